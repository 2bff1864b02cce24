"""In which dtype the gradients of a step are added up over its micro-batches.

Before: the whole-batch graph, in which an optimizer reads a gradient. After: a gradient of half
precision goes through float32 on its way there, and with it the place where the split in time adds
up, as sums do not pass a conversion that loses something:

    %w.wide = aten._to_copy(%g, float32)
    %w.sum  = aten._to_copy(%w.wide, bfloat16)      not in a part of the sum

Where gradients are to be added up as they are, the conversions between them and the optimizer, in
graphs with float32 parameters or masters, take the whole sum: `weft.cast_whole`.
"""

from __future__ import annotations

from dataclasses import replace

from weft.compiler.context import Context
from weft.compiler.graph.rewriting import only_result
from weft.compiler.training.gradients import gradients, passed_to_gradients, with_sources
from weft.ir.logical import Call, LogicalGraph, Ref, Value
from weft.ops.call import Token
from weft.ops.dtypes import holds
from weft.strategy.precision import Precision

CAST = "aten._to_copy.default"
CASTS = frozenset((CAST, "prims.convert_element_type.default", "weft.cast_whole"))
HALF = ("bfloat16", "float16")


def lay_sums(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph whose gradients are added up over micro-batches in float32, or as they are."""
    if context.options.micro_batches == 1:
        return graph
    if (context.options.precision or Precision()).accumulate is None:
        return _as_they_are(graph)
    return _in_float32(graph)


def cast_call(source: Value, dtype: str, name: str, like: Call, op: str = CAST) -> Call:
    """A conversion of a value, run where `like` is."""
    made = replace(source, name=name, dtype=dtype)
    if op == CAST:
        args, kwargs = (Ref(source.name),), (("dtype", Token("dtype", dtype)),)
        return Call(op, args, kwargs, (made,), like.location, like.phase)
    every = (Ref(source.name), Token("dtype", dtype))
    return Call(op, every, (), (made,), like.location, like.phase)


def _in_float32(graph: LogicalGraph) -> LogicalGraph:
    calls: list[Call] = []
    sources: dict[str, str] = {}
    for each in gradients(graph):
        maker = graph.producers[each.value.name]
        if each.value.dtype in HALF and isinstance(maker, Call):
            wide = cast_call(each.value, "float32", f"{each.value.name}.wide", maker)
            narrow = cast_call(only_result(wide), each.value.dtype, f"{each.value.name}.sum", maker)
            calls += [wide, narrow]
            sources[each.target] = f"{each.value.name}.sum"
    return with_sources(graph, calls, sources)


def _as_they_are(graph: LogicalGraph) -> LogicalGraph:
    """Conversions of gradients to a wider dtype wait for the sum."""
    paths = passed_to_gradients(graph)

    def waits(node: object) -> bool:
        if not isinstance(node, Call) or node.op not in CASTS:
            return False
        (made,) = node.outputs
        if made is None or made.name not in paths:
            return False
        source = graph.values[_operand(node)]
        return source.dtype in HALF and holds(made.dtype, source.dtype)

    nodes = (_waiting(graph, node) if waits(node) else node for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _waiting(graph: LogicalGraph, node: object) -> Call:
    assert isinstance(node, Call)
    made = only_result(node)
    source = graph.values[_operand(node)]
    return cast_call(source, made.dtype, made.name, node, "weft.cast_whole")


def _operand(node: Call) -> str:
    (ref,) = (arg for arg in node.args if isinstance(arg, Ref))
    return ref.name
