"""Rows to their experts and back, where a strategy splits experts over ranks (GShard, section 3).

Between the products of one mixture of experts, rows are worked on alone. So those calls move to
buffers: a block of rows for the experts of each rank (`weft.dispatch` in front, `weft.combine`
behind), where block and experts split together, so that nothing but rows crosses between ranks: from
split rows to split blocks is an all-to-all, from whole rows it costs nothing. The buffers hold what a
group of rows, those of one rank, may send to a block: all that there can be, or as many times the even
share as `capacity` says; more is an error at run time, never a row less.

Before: `y = expert_mm(f(expert_mm(x, w, ids)), v, ids)`, rows [s, …]. After: the same on rows
[blocks, groups · capacity, …], and `y` combined; in the backward too. A token's k rows are sent from
the token, and the sum of what its experts make is what comes back: `weft.combine` adds it up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.context import Context
from weft.compiler.experts.buffer_calls import calls_in_buffers
from weft.compiler.experts.expert_biases import ONES, as_products
from weft.compiler.experts.mixtures import Mixture, mixtures
from weft.compiler.experts.rows import has_rows, in_blocks, repeated, summed
from weft.compiler.graph.rewriting import needed
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value
from weft.ops.rules.own.experts import COMBINE, DISPATCH, EXPERT_GRADIENT, EXPERT_MM, ROUTES


def dispatch_rows(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph with rows sent to the experts that hints split; in micro-batches, if any."""
    for mixture in mixtures(graph, context):
        graph = _sent(graph, mixture)
    return graph


def _sent(graph: LogicalGraph, mixture: Mixture) -> LogicalGraph:
    """The graph with the rows of one mixture sent to its experts."""
    graph, products = as_products(graph, mixture.biases)
    mixture = replace(mixture, calls=(*mixture.calls, *products), biases=())
    inside = calls_in_buffers(graph, mixture)
    writer = _DispatchWriter(graph, mixture, inside, Buffers(graph, mixture))
    for node in graph.nodes:
        writer.write(node)
    return needed(replace(graph, nodes=tuple(writer.nodes)))


@final
@dataclass
class _DispatchWriter:
    """Writes the nodes of the new graph.

    Attributes:
        inside: the ids of calls that run on rows in the buffers.
        blocks: what stands for values there.
        buffers: what is in them, and the calls around them.
        routed: true where the places of rows were found.
    """

    graph: LogicalGraph
    mixture: Mixture
    inside: frozenset[int]
    buffers: Buffers
    nodes: list[Node] = field(default_factory=list)
    blocks: dict[str, Value] = field(default_factory=dict)
    routed: bool = False

    def write(self, node: Node) -> None:
        if not isinstance(node, Call):
            self.nodes.append(node)
            return
        if id(node) not in self.inside:
            self.nodes.append(self._summed(node) or node)
            return
        if not self.routed:
            self.nodes.extend(self.buffers.routes(node))
            self.routed = True
        if node.op in (EXPERT_MM, EXPERT_GRADIENT):
            self._product(node)
        else:
            self._between(node)

    def _product(self, node: Call) -> None:
        x, other, _, *more = node.args
        if node.op == EXPERT_MM:
            args: tuple[Arg, ...] = (self._block(node, x), other, self.buffers.experts, *more)
            self._made(replace(node, args=args))
        else:
            args = (self._block(node, x), self._block(node, other), self.buffers.experts, *more)
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
        made = [self.buffers.value(value) if value else None for value in node.outputs]
        self.nodes.append(replace(node, outputs=tuple(made)))
        for value, block in zip(node.outputs, made, strict=True):
            if value is None or block is None:
                continue
            self.blocks[value.name] = block
            if any(self._reads_rows(user, value.name) for user in self.graph.users[value.name]):
                args = self.buffers.back(block, 1)
                self.nodes.append(Call(COMBINE, args, (), (value,), node.location, node.phase))

    def _reads_rows(self, user: Node, name: str) -> bool:
        """True where a node outside of the buffers reads rows, not sums of those of each token."""
        if id(user) in self.inside:
            return False
        made = [value.name for value in _outputs(user)]
        readers = [reader for one in made for reader in self.graph.users[one]]
        return not readers or any(self._source(reader) != name for reader in readers)

    def _source(self, node: Node) -> str | None:
        """The value made in the buffers, where a call adds up the rows of each token of it."""
        found = summed(self.graph, node) if isinstance(node, Call) else None
        if found is None or not self._whole_tokens(found[1]):
            return None
        name, _ = found
        return name if id(self.graph.producers[name]) in self.inside else None

    def _summed(self, node: Call) -> Call | None:
        """A call that adds up the rows of each token, by what is in the buffers."""
        name = self._source(node)
        if name is None:
            return None
        each = self.mixture.ids.shape[0] // self.graph.values[_made(node)].shape[0]
        args = self.buffers.back(self.blocks[name], each)
        return replace(node, op=COMBINE, args=args, kwargs=())

    def _whole_tokens(self, each: int) -> bool:
        """True where all rows of a token, `each`, are in one group."""
        return self.mixture.ids.shape[0] // each % self.mixture.groups == 0

    def _block(self, node: Call, arg: Arg) -> Ref:
        """The value of a row operand in the buffers, which is sent there first if it is not."""
        name = _name(arg)
        maker = self.graph.producers[name]
        if name not in self.blocks and isinstance(maker, Call) and maker.op == ONES:
            block = self.blocks[name] = self.buffers.value(self.graph.values[name])
            op, args = "aten.new_ones.default", (Ref(self.mixture.ids.name), block.shape)
            self.nodes.append(replace(maker, op=op, args=args, outputs=(block,)))
        if name not in self.blocks:
            tokens = repeated(self.graph, name)
            source, each = tokens if tokens and self._whole_tokens(tokens[1]) else (name, 1)
            self.blocks[name] = self.buffers.value(self.graph.values[name])
            self.nodes.append(self.buffers.send(node, self.blocks[name], Ref(source), 0, each))
        return Ref(self.blocks[name].name)


def _made(node: Call) -> str:
    (value,) = node.outputs
    assert value is not None  # of an op with one result
    return value.name


def _outputs(node: Node) -> Sequence[Value]:
    return [value for value in node.outputs if value] if isinstance(node, Call) else []


def _name(arg: Arg) -> str:
    assert isinstance(arg, Ref)
    return arg.name


@final
@dataclass(frozen=True)
class Buffers:
    """Names what is in the buffers, and makes the calls around them; `routes` come before all others.

    Attributes:
        graph: in which the mixture is.
        mixture: with its groups of rows, its blocks of experts, and the capacity of each.
    """

    graph: LogicalGraph
    mixture: Mixture

    @property
    def places(self) -> Value:
        """The places of the rows, in the buffers: [rows], int64."""
        ids = self.mixture.ids
        return Value(f"{ids.name}.places", ids.shape, "int64")

    @property
    def own(self) -> Value:
        """The expert of each row, counted from the first of its block: [rows]."""
        return Value(f"{self.mixture.ids.name}.own", self.mixture.ids.shape, self.mixture.ids.dtype)

    @property
    def experts(self) -> Ref:
        """The experts of the rows that come."""
        return Ref(self.value(self.own).name)

    def value(self, value: Value) -> Value:
        """A value with rows, in the buffers: [blocks, rows of a block, …]."""
        shape = (self.mixture.blocks, self.mixture.rows, *value.shape[1:])
        name = f"{value.name}.sent"
        while name in self.graph.values:  # another mixture sends the same rows elsewhere
            name += ".sent"
        return Value(name, shape, value.dtype)

    def routes(self, like: Call) -> Iterator[Call]:
        """Find the places that rows go to, and the experts of those that come, counted from each block's first."""
        mixture, ids = self.mixture, self.mixture.ids
        args = (Ref(ids.name), mixture.experts, mixture.groups, mixture.blocks, mixture.capacity)
        yield Call(ROUTES, args, (), (self.places,), like.location, like.phase)
        op, counted = "aten.remainder.Scalar", (Ref(ids.name), mixture.experts // mixture.blocks)
        yield Call(op, counted, (), (self.own,), like.location, like.phase)
        yield self.send(like, self.value(self.own), Ref(self.own.name), -1)

    def send(self, like: Call, block: Value, rows: Ref, around: int, each: int = 1) -> Call:
        """Send rows where `like` stands: `each` of them from a token, and `around` where a buffer has none."""
        mixture = self.mixture
        sizes = (mixture.groups, mixture.blocks, mixture.capacity, around, 0, each)
        args = (rows, Ref(self.places.name), *sizes)
        return Call(DISPATCH, args, (), (block,), like.location, like.phase)

    def back(self, block: Value, each: int) -> tuple[Arg, ...]:
        """The arguments of a call that takes rows back: the sums of `each` of them, those of a token."""
        mixture = self.mixture
        places = Ref(self.places.name)
        return (Ref(block.name), places, mixture.groups, mixture.capacity, 0, each)
