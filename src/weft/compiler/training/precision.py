"""The dtype in which gradients are summed, over micro-batches and over ranks.

Before: the whole-batch graph, in which an optimizer reads a gradient. After: a gradient of half
precision goes through float32 on its way there, and with it the place where the split in time adds
up, as sums do not pass a conversion that loses something:

    %w.wide = aten._to_copy(%g, float32)
    %w.sum  = aten._to_copy(%w.wide, bfloat16)      not in a part of the sum

If gradients are to be added up as they are, the conversions between them and the optimizer, in
graphs with float32 parameters or FP32 main parameters, take the whole sum: `weft.cast_whole`.

In which dtype sums of several ranks are sent, of gradients and of activations, is said once layouts are known. Before:
a boxing adds up the parts of ranks in the dtype in which they were made. After, where gradients are to be reduced in
float32:

    %g.wide = aten._to_copy(%g, float32)       still a part of the sum
    %g.box  = box %g.wide                      float32 is sent
    %w      = …                                read it as it is where they converted it to float32,
    %g.back = aten._to_copy(%g.box, bfloat16)  others what it is when rounded

and where a wider gradient is to be sent as bf16, `weft.cast_parts` before the boxing, and a conversion
back after it. So layouts do not depend on it, and the bytes of every boxing follow from its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.context import Context
from weft.compiler.graph.rewriting import only_result
from weft.compiler.training.gradients import gradients, passed_to_gradients, with_sources
from weft.ir.logical import FORWARD, Box, Call, LogicalGraph, Node, Ref, Value
from weft.ir.nodes import renamed
from weft.layout import Partial
from weft.ops import shares_memory
from weft.ops.call import Token
from weft.ops.cost import holds
from weft.strategy.precision import Precision, dtype_of

_FLOATS = ("float16", "bfloat16", "float32")  # float64 stays: whoever has it means it


CAST = "aten._to_copy.default"
CASTS = frozenset((CAST, "prims.convert_element_type.default", "weft.cast_whole"))
HALF = ("bfloat16", "float16")


def lay_sums(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph whose gradients are added up over micro-batches in float32, or as they are."""
    if context.options.micro_batches == 1:
        return graph
    if (context.options.precision or Precision()).accumulate is None:
        # Conversions of gradients to a wider dtype wait for the sum.
        paths, nodes = passed_to_gradients(graph), list[Node]()
        for node in graph.nodes:
            if isinstance(node, Call) and node.op in CASTS and node.output_names[0] in paths:
                made, source = only_result(node), graph.values[node.operands[0]]
                if source.dtype in HALF and holds(made.dtype, source.dtype):
                    node = cast_call(source, made.dtype, made.name, node, "weft.cast_whole")
            nodes.append(node)
        return replace(graph, nodes=tuple(nodes))
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


def cast_call(source: Value, dtype: str, name: str, like: Call, op: str = CAST) -> Call:
    """A conversion of a value, run where `like` is."""
    made = replace(source, name=name, dtype=dtype)
    if op == CAST:
        args, kwargs = (source.ref,), (("dtype", Token("dtype", dtype)),)
        return Call.of(op, args, (made,), kwargs=kwargs, location=like.location, phase=like.phase)
    every = (source.ref, Token("dtype", dtype))
    return Call.of(op, every, (made,), location=like.location, phase=like.phase)


def lay_exchanges(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph whose sums are sent in the dtypes that the user names."""
    wanted = _wanted(graph, context.options.precision or Precision())
    if not wanted:
        return graph
    rewriter = _DtypeRewriter(graph, wanted)
    for node in graph.nodes:
        rewriter.add(node)
    # From the end, what is read.
    used: set[str] = set()
    kept: list[Node] = []
    for node in reversed(rewriter.nodes):
        idle = isinstance(node, Call) and (shares_memory(node.op) or node.op in CASTS)
        if not idle or any(value.name in used for value in node.makes):
            used.update(node.uses)
            kept.append(node)
    return replace(graph, nodes=tuple(reversed(kept)))


def _wanted(graph: LogicalGraph, precision: Precision) -> dict[str, str]:
    """For the result of each boxing that is to be sent in another dtype: which."""
    gradients = passed_to_gradients(graph) if precision.reduce else frozenset[str]()
    found: dict[str, str] = {}
    for node in graph.of_kind(Box):
        own, layouts = node.output.dtype, (graph.values[node.input.name].laid, node.output.laid)
        before, after = (layout.sbp.count(Partial()) for layout in layouts)
        if own not in _FLOATS or before <= after:
            continue
        named = precision.reduce if node.output.name in gradients else precision.activations
        if named is not None and dtype_of(named) != own:
            found[node.output.name] = dtype_of(named)
    return found


@final
@dataclass(slots=True)
class _DtypeRewriter:
    """The state of the walk.

    Attributes:
        wanted: for the results of boxings, the dtype to be sent in.
        names: what stands for a value.
        kept: the same values in the dtype that travelled, for conversions to it; by name.
    """

    graph: LogicalGraph
    wanted: dict[str, str]
    nodes: list[Node] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    kept: dict[str, Value] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        if isinstance(node, Box) and node.output.name in self.wanted:
            value, dtype = self.graph.values[node.input.name], self.wanted[node.output.name]
            value = self.kept.get(value.name, value)
            value = replace(value, name=self.names.get(value.name, value.name))
            narrows = not holds(dtype, value.dtype)
            op = "weft.cast_parts" if narrows else "aten._to_copy.default"
            # The call whose place in stages and phases a conversion shares.
            maker = self.graph.producers[node.input.name]
            while isinstance(maker, Box):
                maker = self.graph.producers[maker.input.name]
            maker = maker if isinstance(maker, Call) else Call.of("", (), (), phase=FORWARD)
            before = cast_call(value, dtype, f"{node.output.name}.parts", maker, op)
            sent = replace(node.output, name=f"{node.output.name}.sum", dtype=dtype)
            boxed = replace(node, input=Ref(only_result(before).name), output=sent)
            # Parts are rounded on the way back where another boxing is still to add them up.
            parts = any(isinstance(sbp, Partial) for sbp in sent.laid.sbp)
            op = "weft.cast_parts" if parts else CAST
            back = cast_call(sent, node.output.dtype, node.output.name, maker, op)
            self.nodes.extend((before, boxed, back))
            if not narrows:
                self.kept[node.output.name] = sent
            return
        # The operand of a node of one operand and one result, in the dtype that travelled.
        uses = set(node.uses)
        alone = len(uses) == 1 == len(node.makes)
        source = self.kept.get(uses.pop()) if alone else None
        if source is not None and isinstance(node, Call):
            (made,) = node.makes
            if node.op in CASTS and made.dtype == source.dtype:
                self.names[made.name] = source.name
                return
            if shares_memory(node.op):
                # A view of what travelled, beside that of what it was rounded to.
                wide = replace(made, name=f"{made.name}.travelled", dtype=source.dtype)
                self.nodes.append(node.on(source).changed(outputs=(wide,)))
                self.kept[made.name] = wide
        self.nodes.append(renamed(node, self.names))
