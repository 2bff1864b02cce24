"""In which dtype sums of several ranks travel: of gradients, and of activations.

Before: a graph with layouts, in which a boxing adds up the parts of ranks in the dtype in which they
were made. After, where gradients are to be reduced in float32:

    %g.wide = aten._to_copy(%g, float32)       still a part of the sum
    %g.box  = box %g.wide                      float32 travels
    %w      = …                                read it as it is where they converted it to float32,
    %g.back = aten._to_copy(%g.box, bfloat16)  others what it is when rounded

and where a wider gradient is to travel as bf16, `weft.cast_parts` before the boxing, and a conversion
back behind it. So layouts do not depend on it, and the bytes of every boxing follow from its dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.context import Context
from weft.compiler.graph.rewriting import only_result
from weft.compiler.training.gradients import passed_to_gradients
from weft.compiler.training.precision import CAST, CASTS, cast_call
from weft.ir.logical import (
    FORWARD,
    Box,
    Call,
    LogicalGraph,
    Node,
    Ref,
    Value,
    node_outputs,
    node_uses,
)
from weft.ir.queries.op_calls import operand_names
from weft.ir.renamed import renamed
from weft.layout import Partial
from weft.ops import shares_memory
from weft.ops.dtypes import holds
from weft.strategy.precision import Precision, dtype_of

_FLOATS = ("float16", "bfloat16", "float32")  # float64 stays: whoever has it means it


def lay_exchanges(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph whose sums travel in the dtypes that the user names.

    Args:
        graph: with layouts and boxing.
        context: with the precision of the step; None leaves every sum as it is made.
    """
    wanted = _wanted(graph, context.options.precision or Precision())
    if not wanted:
        return graph
    rewriter = _DtypeRewriter(graph, wanted)
    for node in graph.nodes:
        rewriter.add(node)
    return replace(graph, nodes=_alive(rewriter.nodes))


def _wanted(graph: LogicalGraph, precision: Precision) -> dict[str, str]:
    """For the result of each boxing that is to travel in another dtype: which."""
    gradients = passed_to_gradients(graph) if precision.reduce else frozenset[str]()
    found: dict[str, str] = {}
    for node in graph.of_kind(Box):
        own = node.output.dtype
        if own not in _FLOATS or not _adds_up(graph, node):
            continue
        named = precision.reduce if node.output.name in gradients else precision.activations
        if named is not None and dtype_of(named) != own:
            found[node.output.name] = dtype_of(named)
    return found


def _adds_up(graph: LogicalGraph, node: Box) -> bool:
    """True where a boxing adds up parts that ranks have."""
    before, after = graph.values[node.input.name].layout, node.output.layout
    assert before is not None
    assert after is not None
    sums = sum(sbp == Partial() for sbp in before.sbp)
    return sums > sum(sbp == Partial() for sbp in after.sbp)


@final
@dataclass(frozen=True)
class _DtypeRewriter:
    """The state of the walk.

    Attributes:
        wanted: for the results of boxings, the dtype to travel in.
        nodes: those of the new graph.
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
            self._box(node)
            return
        source = self._kept_operand(node)
        if source is not None and isinstance(node, Call):
            (made,) = node_outputs(node)
            if node.op in CASTS and made.dtype == source.dtype:
                self.names[made.name] = source.name
                return
            if shares_memory(node.op):
                self._view(node, made, source)
        self.nodes.append(renamed(node, self.names))

    def _box(self, node: Box) -> None:
        """The conversion of the parts, the boxing, and the conversion back."""
        value, dtype = self.graph.values[node.input.name], self.wanted[node.output.name]
        value = self.kept.get(value.name, value)
        value = replace(value, name=self.names.get(value.name, value.name))
        narrows = not holds(dtype, value.dtype)
        op = "weft.cast_parts" if narrows else "aten._to_copy.default"
        maker = self._maker(node.input.name)
        before = cast_call(value, dtype, f"{node.output.name}.parts", maker, op)
        sent = replace(node.output, name=f"{node.output.name}.sum", dtype=dtype)
        boxed = replace(node, input=Ref(only_result(before).name), output=sent)
        back = cast_call(sent, node.output.dtype, node.output.name, maker, _narrowing(sent))
        self.nodes.extend((before, boxed, back))
        if not narrows:
            self.kept[node.output.name] = sent

    def _view(self, node: Call, made: Value, source: Value) -> None:
        """A view of what travelled, beside that of what it was rounded to."""
        wide = replace(made, name=f"{made.name}.travelled", dtype=source.dtype)
        (old,) = operand_names(node)
        view = renamed(replace(node, outputs=(wide,)), {old: source.name})
        self.nodes.append(view)
        self.kept[made.name] = wide

    def _kept_operand(self, node: Node) -> Value | None:
        """The operand of a call of one operand and one result, in the dtype that travelled."""
        uses = set(node_uses(node))
        if len(uses) != 1 or len(node_outputs(node)) != 1:
            return None
        return self.kept.get(uses.pop())

    def _maker(self, name: str) -> Call:
        """The call whose place in stages and phases a conversion shares."""
        node = self.graph.producers[name]
        while isinstance(node, Box):
            node = self.graph.producers[node.input.name]
        return node if isinstance(node, Call) else Call("", (), (), (), None, FORWARD)


def _narrowing(sent: Value) -> str:
    """The conversion back: parts are rounded where another boxing is still to add them up."""
    parts = sent.layout is not None and any(isinstance(sbp, Partial) for sbp in sent.layout.sbp)
    return "weft.cast_parts" if parts else CAST


def _alive(nodes: list[Node]) -> tuple[Node, ...]:
    """Without conversions and views that nobody reads."""
    return tuple(reversed(tuple(_read(nodes))))


def _read(nodes: list[Node]) -> Iterator[Node]:
    """From the end, what is read."""
    used: set[str] = set()
    for node in reversed(nodes):
        idle = isinstance(node, Call) and (shares_memory(node.op) or node.op in CASTS)
        if idle and not any(value.name in used for value in node_outputs(node)):
            continue
        used.update(node_uses(node))
        yield node
