"""Rows to their experts and back, where a strategy splits experts over ranks (GShard, section 3).

Between the products of one mixture of experts, rows are worked on alone. So those calls move to
buffers: a block of rows for the experts of each rank (`weft.dispatch` in front, `weft.combine`
behind), where block and experts split together, so that nothing but rows crosses between ranks: from
split rows to split blocks is an all-to-all, from whole rows it costs nothing. The buffers hold what a
group of rows, those of one rank, may send to a block: all that there can be, or as many times the even
share as `capacity` says; more is an error at run time, never a row less.

Before: `y = expert_mm(f(expert_mm(x, w, ids)), v, ids)`, rows [s, …]. After: the same on rows
[blocks, groups · capacity, …], and `y` combined; in the backward too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.compiler.deduce import Hints
from weft.compiler.mixtures import Mixture, expert_notes, mixtures
from weft.compiler.row_calls import has_rows, in_blocks, works_on_rows
from weft.compiler.stages import Stages
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value, node_uses
from weft.ops.rules.experts import COMBINE, DISPATCH, EXPERT_GRADIENT, EXPERT_MM, ROUTES


@dataclass(frozen=True)
class Dispatched:
    """The graph, and in words what the way of its rows costs."""

    graph: LogicalGraph
    notes: tuple[str, ...]


def dispatch_rows(
    graph: LogicalGraph, hints: Mapping[int, Hints], stages: Stages, capacity: float | None
) -> Dispatched:
    """The graph with rows sent to the experts that `hints` split, and what they cost.

    Args:
        graph: the step; in micro-batches, if any.
        hints: what the user fixed, by the number of axes of a placement.
        stages: placements of the stages.
        capacity: rows that a group may send to a block, in even shares; None for all.
    """
    found = mixtures(graph, hints, stages, capacity)
    notes = expert_notes(graph, found, hints, stages)
    for mixture in found:
        graph = _sent(graph, mixture)
    return Dispatched(graph, notes)


def _sent(graph: LogicalGraph, mixture: Mixture) -> LogicalGraph:
    """The graph with the rows of one mixture sent to its experts."""
    writer = _Writer(graph, mixture, _inside(graph, mixture))
    for node in graph.nodes:
        writer.write(node)
    return replace(graph, nodes=tuple(writer.nodes))


def _inside(graph: LogicalGraph, mixture: Mixture) -> frozenset[int]:
    """The ids of the mixture's products and of the calls between them that work on rows alone."""
    rows = mixture.ids.shape[0]
    products = {id(call) for call in mixture.calls}
    below: set[int] = set()  # what products lead to
    made: set[str] = set()
    for node in graph.nodes:
        if id(node) in products:
            made.update(_rows_made(node, rows))
        elif isinstance(node, Call) and any(name in made for name in node_uses(node)):
            alone = works_on_rows(graph, node, rows)
            if alone and all(has_rows(graph, node, x, rows) for x in node_uses(node) if x in made):
                below.add(id(node))
                made.update(value.name for value in node.outputs if value)
    inside = set(products)
    read: set[str] = set()
    for node in reversed(graph.nodes):
        leads = id(node) in below and any(v.name in read for v in _outputs(node))
        if id(node) in products or leads:
            inside.add(id(node))
            read.update(node_uses(node))
    return frozenset(inside)


def _rows_made(node: Node, rows: int) -> list[str]:
    return [v.name for v in _outputs(node) if v.shape[:1] == (rows,) and len(v.shape) == 2]


@dataclass
class _Writer:
    """Writes the nodes of the new graph; `blocks` holds what stands for values in the buffers."""

    graph: LogicalGraph
    mixture: Mixture
    inside: frozenset[int]
    nodes: list[Node] = field(default_factory=list)
    blocks: dict[str, Value] = field(default_factory=dict)
    places: Ref | None = None

    def write(self, node: Node) -> None:
        if not isinstance(node, Call) or id(node) not in self.inside:
            self.nodes.append(node)
            return
        self._route(node)
        if node.op in (EXPERT_MM, EXPERT_GRADIENT):
            self._product(node)
        else:
            self._between(node)

    def _product(self, node: Call) -> None:
        x, other, _, *more = node.args
        blocks = Ref(self.blocks[self.mixture.ids.name].name)
        if node.op == EXPERT_MM:
            args: tuple[Arg, ...] = (self._block(node, x), other, blocks, *more)
            self._made(replace(node, args=args))
        else:
            args = (self._block(node, x), self._block(node, other), blocks, *more)
            self.nodes.append(replace(node, args=args))

    def _between(self, node: Call) -> None:
        shape, rows = (self.mixture.blocks, self.mixture.rows), self.mixture.ids.shape[0]

        def moved(name: str) -> Ref:
            return (
                self._block(node, Ref(name))
                if has_rows(self.graph, node, name, rows)
                else Ref(name)
            )

        self._made(in_blocks(self.graph, node, shape, moved))

    def _made(self, node: Call) -> None:
        """Write a call whose results stay in the buffers, and take back those that are read outside."""
        made = [self._in_buffer(value) if value else None for value in node.outputs]
        self.nodes.append(replace(node, outputs=tuple(made)))
        for value, block in zip(node.outputs, made, strict=True):
            if value is None or block is None:
                continue
            self.blocks[value.name] = block
            if any(id(user) not in self.inside for user in self.graph.users[value.name]):
                args = (
                    Ref(block.name),
                    self._places(),
                    self.mixture.groups,
                    self.mixture.capacity,
                    0,
                )
                self.nodes.append(Call(COMBINE, args, (), (value,), node.location, node.phase))

    def _block(self, node: Call, arg: Arg) -> Ref:
        """The value of a row operand in the buffers, which is sent there first if it is not."""
        name = _name(arg)
        if name not in self.blocks:
            self._send(node, name, Ref(name), 0)
        return Ref(self.blocks[name].name)

    def _send(self, node: Call, name: str, rows: Ref, around: int) -> None:
        mixture, block = self.mixture, self._in_buffer(self.graph.values[name])
        args = (rows, self._places(), mixture.groups, mixture.blocks, mixture.capacity, around, 0)
        self.nodes.append(Call(DISPATCH, args, (), (block,), node.location, node.phase))
        self.blocks[name] = block

    def _route(self, node: Call) -> None:
        """Where rows go, and the experts of those that come, counted from each block's first."""
        if self.places is not None:
            return
        mixture, ids = self.mixture, self.mixture.ids
        places = Value(f"{ids.name}.places", ids.shape, "int64")
        args = (Ref(ids.name), mixture.experts, mixture.groups, mixture.blocks, mixture.capacity)
        self.nodes.append(Call(ROUTES, args, (), (places,), node.location, node.phase))
        self.places = Ref(places.name)
        own = Value(f"{ids.name}.own", ids.shape, ids.dtype)
        each = mixture.experts // mixture.blocks
        op, counted = "aten.remainder.Scalar", (Ref(ids.name), each)
        self.nodes.append(Call(op, counted, (), (own,), node.location, node.phase))
        self._send(node, ids.name, Ref(own.name), -1)

    def _places(self) -> Ref:
        assert self.places is not None  # made before the first call in the buffers
        return self.places

    def _in_buffer(self, value: Value) -> Value:
        shape = (self.mixture.blocks, self.mixture.rows, *value.shape[1:])
        return Value(f"{value.name}.sent", shape, value.dtype)


def _outputs(node: Node) -> Sequence[Value]:
    return [value for value in node.outputs if value] if isinstance(node, Call) else []


def _name(arg: Arg) -> str:
    assert isinstance(arg, Ref)
    return arg.name
