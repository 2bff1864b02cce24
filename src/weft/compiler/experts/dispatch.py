"""Send rows to their experts and back, if a strategy splits experts over ranks (GShard, section 3).

Between the products of one mixture of experts, rows are worked on alone. So those calls move to
buffers: a block of rows for the experts of each rank (`weft.dispatch` in front, `weft.combine`
behind), where block and experts split together, so that nothing but rows crosses between ranks: from
split rows to split blocks is an all-to-all, from whole rows it costs nothing. The buffers hold what a
group of rows, those of one rank, may send to a block: all that there can be, or as many times the even
share as `capacity` says; more is an error at run time, never a row less.

Before: `y = expert_mm(f(expert_mm(x, w, ids)), v, ids)`, rows [s, …]. After: the same on rows
[blocks, groups · capacity, …], and `y` combined; in the backward too. A token's k rows are sent from
the token, and the sum of what its experts make is what comes back: `weft.combine` adds it up.

Calls on rows alone between the products run on buffers; before them also calls of which one operand alone is wide,
which is sent in place of their result; after them those up to where less crosses: a token's sum, or one number for
each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, final

from weft.compiler.context import Context
from weft.compiler.experts.mixtures import ONES, Mixture, as_products, mixtures
from weft.compiler.graph.rewriting import needed, ref_name
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value
from weft.ops.rule import factors_of
from weft.ops.rules.common import pointwise
from weft.ops.rules.own_ops import COMBINE, DISPATCH, EXPERT_GRADIENT, EXPERT_MM, ROUTES
from weft.units import ITEM_SIZE


def dispatch_rows(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph with rows sent to the experts that hints split; in micro-batches, if any."""
    for mixture in mixtures(graph, context):
        graph, products = as_products(graph, mixture.biases)
        mixture = replace(mixture, calls=(*mixture.calls, *products), biases=())
        inside = calls_in_buffers(graph, mixture)
        writer = _DispatchWriter(graph, mixture, inside, Buffers(graph, mixture))
        for node in graph.nodes:
            writer.write(node)
        graph = needed(replace(graph, nodes=tuple(writer.nodes)))
    return graph


@final
@dataclass(slots=True)
class _DispatchWriter:
    """Writes the nodes of the new graph.

    Attributes:
        inside: the ids of calls that run on rows in the buffers.
        blocks: the values in blocks that replace them.
        buffers: what is in them, and the calls around them.
        routed: true if the places of rows were found.
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
            if (name := self._source(node)) is not None:
                # It adds up the rows of each token, by what is in the buffers.
                each = self.mixture.ids.shape[0] // node.makes[0].shape[0]
                args = self.buffers.back(self.blocks[name], each)
                node = node.changed(op=COMBINE, args=args, kwargs=())
            self.nodes.append(node)
            return
        if not self.routed:
            self.nodes.extend(self.buffers.routes(node))
            self.routed = True
        if node.op in (EXPERT_MM, EXPERT_GRADIENT):
            x, other, _, *more = node.args
            if node.op == EXPERT_MM:
                args = (self._block(node, x), other, self.buffers.experts, *more)
                self._made(node.changed(args=args))
            else:
                args = (self._block(node, x), self._block(node, other), self.buffers.experts, *more)
                self.nodes.append(node.changed(args=args))
        else:
            shape, rows = (self.mixture.blocks, self.mixture.rows), self.mixture.ids.shape[0]

            def moved(name: str) -> Ref:
                ref = self.graph.values[name].ref
                return self._block(node, ref) if has_rows(self.graph, node, name, rows) else ref

            self._made(in_blocks(node, shape, moved))

    def _made(self, node: Call) -> None:
        """Write a call whose results stay in the buffers, and take back those that are read outside."""
        made = [self.buffers.value(value) if value else None for value in node.outputs]
        self.nodes.append(node.changed(outputs=tuple(made)))
        for value, block in zip(node.outputs, made, strict=True):
            if value is None or block is None:
                continue
            self.blocks[value.name] = block
            if any(self._reads_rows(user, value.name) for user in self.graph.users[value.name]):
                args = self.buffers.back(block, 1)
                self.nodes.append(
                    Call.of(COMBINE, args, (value,), location=node.location, phase=node.phase)
                )

    def _reads_rows(self, user: Node, name: str) -> bool:
        """True if a node outside of the buffers reads rows, not sums of the rows of each token."""
        if id(user) in self.inside:
            return False
        readers = [reader for value in user.makes for reader in self.graph.users[value.name]]
        return not readers or any(self._source(reader) != name for reader in readers)

    def _source(self, node: Node) -> str | None:
        """The value in the buffers whose rows a node adds up for each token."""
        found = summed(self.graph, node)
        if found is None or not self._whole_tokens(found[1]):
            return None
        return found[0] if id(self.graph.producers[found[0]]) in self.inside else None

    def _whole_tokens(self, each: int) -> bool:
        """True if all rows of a token, `each`, are in one group."""
        return self.mixture.ids.shape[0] // each % self.mixture.groups == 0

    def _block(self, node: Call, arg: Arg) -> Ref:
        """The value of a row operand in the buffers, which is sent there first if it is not."""
        name = ref_name(arg)
        maker = self.graph.producers[name]
        if name not in self.blocks and isinstance(maker, Call) and maker.op == ONES:
            block = self.blocks[name] = self.buffers.value(self.graph.values[name])
            op, args = "aten.new_ones.default", (self.mixture.ids.ref, block.shape)
            self.nodes.append(maker.changed(op=op, args=args, outputs=(block,)))
        if name not in self.blocks:
            tokens = repeated(self.graph, name)
            source, each = tokens if tokens and self._whole_tokens(tokens[1]) else (name, 1)
            self.blocks[name] = self.buffers.value(self.graph.values[name])
            self.nodes.append(
                self.buffers.send(node, self.blocks[name], self.graph.values[source].ref, 0, each)
            )
        return self.blocks[name].ref


@final
@dataclass(frozen=True)
class Buffers:
    """Names what is in the buffers, and makes the calls around them; `routes` come before all others."""

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
        return self.value(self.own).ref

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
        args = (ids.ref, mixture.experts, mixture.groups, mixture.blocks, mixture.capacity)
        yield Call.of(ROUTES, args, (self.places,), location=like.location, phase=like.phase)
        op, counted = "aten.remainder.Scalar", (ids.ref, mixture.experts // mixture.blocks)
        yield Call.of(op, counted, (self.own,), location=like.location, phase=like.phase)
        yield self.send(like, self.value(self.own), self.own.ref, -1)

    def send(self, like: Call, block: Value, rows: Ref, around: int, each: int = 1) -> Call:
        """Send rows where `like` stands: `each` of them from a token, and `around` where a buffer has none."""
        mixture = self.mixture
        sizes = (mixture.groups, mixture.blocks, mixture.capacity, around, 0, each)
        args = (rows, self.places.ref, *sizes)
        return Call.of(DISPATCH, args, (block,), location=like.location, phase=like.phase)

    def back(self, block: Value, each: int) -> tuple[Arg, ...]:
        """The arguments of a call that takes rows back: the sums of `each` of them, those of a token."""
        mixture = self.mixture
        places = self.places.ref
        return (block.ref, places, mixture.groups, mixture.capacity, 0, each)


def calls_in_buffers(graph: LogicalGraph, mixture: Mixture) -> frozenset[int]:
    """The ids of the calls of a mixture that run on rows in its buffers."""
    maker = graph.producers[mixture.ids.name]
    start = next(place for place, node in enumerate(graph.nodes) if node is maker)
    # Before the experts of the rows are known nothing can be sent.
    calls = [node for node in graph.nodes[start + 1 :] if isinstance(node, Call)]
    found = _Found(graph, mixture.ids.shape[0], calls, {id(call) for call in mixture.calls})
    found.between()
    found.before()
    found.behind()
    return frozenset(found.inside)


@final
@dataclass(slots=True)
class _Found:
    """The calls, by id, that run on rows in buffers: at first the products; `calls` are all after the experts."""

    graph: LogicalGraph
    rows: int
    calls: Sequence[Call]
    inside: set[int]

    def between(self) -> None:
        """Calls on rows alone that lead from products to products."""
        below: set[int] = set()
        made: set[str] = set()
        for node in self.calls:
            if id(node) in self.inside:
                made.update(self._rows_made(node))
            elif self._alone(node) and made.intersection(self._row_operands(node)):
                below.add(id(node))
                made.update(node.output_names)
        self._keep_leading(below, set())

    def before(self) -> None:
        """Calls that are read in the buffers alone, and have as little to send as they make."""
        for node in reversed(self.calls):
            if id(node) in self.inside or not self._alone(node):
                continue
            users = [user for value in node.makes for user in self.graph.users[value.name]]
            wide = [name for name in self._row_operands(node) if self._is_wide(name)]
            if len(wide) == len(node.makes) == 1 and users:
                sent, made = (
                    ITEM_SIZE[self.graph.values[wide[0]].dtype],
                    ITEM_SIZE[node.makes[0].dtype],
                )
                if sent <= made and all(id(user) in self.inside for user in users):
                    self.inside.add(id(node))

    def behind(self) -> None:
        """Calls on what is made in the buffers, or sent there, that end in less than rows of full width."""
        made: set[str] = set()
        for node in self.calls:
            if id(node) in self.inside:
                made.update(node.uses, self._rows_made(node))
        below: set[int] = set()
        ends: set[int] = set()
        for node in self.calls:
            if id(node) in self.inside or not self._alone(node):
                continue
            given = self._row_operands(node)
            wide = [name for name in given if self._is_wide(name)]
            if made.intersection(given) and made.issuperset(wide):
                below.add(id(node))
                made.update(node.output_names)
                if wide and not any(self._is_wide(value.name) for value in node.makes):
                    ends.add(id(node))
        sums = (summed(self.graph, node) for node in self.calls)
        ends |= below & {id(self.graph.producers[whole[0]]) for whole in sums if whole}
        self._keep_leading(below, ends)

    def _keep_leading(self, below: set[int], ends: set[int]) -> None:
        """Add those below products that are ends, or lead to what is inside."""
        read: set[str] = set()
        for node in reversed(self.calls):
            leads = id(node) in ends or bool(read.intersection(node.output_names))
            if id(node) in self.inside or (id(node) in below and leads):
                self.inside.add(id(node))
                read.update(node.uses)

    def _alone(self, node: Call) -> bool:
        return works_on_rows(self.graph, node, self.rows)

    def _row_operands(self, node: Call) -> list[str]:
        return [x for x in node.uses if has_rows(self.graph, node, x, self.rows)]

    def _rows_made(self, node: Call) -> list[str]:
        """The results of a product that are rows."""
        return [x.name for x in node.makes if x.shape[0] == self.rows and len(x.shape) == 2]

    def _is_wide(self, name: str) -> bool:
        return prod(self.graph.values[name].shape[1:]) > 1


# Calls that work on each row alone, and the same on rows in blocks: [s, …] becomes [b, r, …].
#
# Rows that stand several times in a row, and sums of such: how tokens become rows of experts and come back.


# Ops along other dimensions than the rows: the places of the arguments that name dimensions, and of those that name
# shapes.
_DIMS: dict[str, int] = {
    "aten.slice.Tensor": 1,
    "aten.split.Tensor": 2,
    "aten.split_with_sizes.default": 2,
    "aten.cat.default": 1,
    "aten.sum.dim_IntList": 1,
    "aten.slice_backward.default": 2,
}
_SHAPES = {"aten.slice_backward.default": 1, "aten.expand.default": 1}
_ALIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "uniform")


def works_on_rows(graph: LogicalGraph, node: Call, rows: int) -> bool:
    """True if a call makes each of `rows` rows of its results from the same rows of operands."""
    if not node.makes or any(value.shape[:1] != (rows,) for value in node.makes):
        return False
    if node.op in _DIMS:
        shapes = [graph.values[name].shape for name in node.uses]
        rank, place = len(shapes[0]), _DIMS[node.op]
        # If no dimension is named, it is the first.
        dims: Any = node.args[place] if place < len(node.args) else 0
        along = dims if isinstance(dims, tuple) else (dims,)
        whole = all(shape[:1] == (rows,) for shape in shapes)
        return whole and rank > 1 and all(dim % rank for dim in along)
    if factors_of(node.op) is not pointwise or any(word in node.op for word in _ALIKE):
        return False
    # Rows are the first dimension of all that have as many dimensions as the result.
    shape: Any = node.args[_SHAPES[node.op]] if node.op in _SHAPES else (rows,)
    return tuple(shape)[:1] == (rows,)


def has_rows(graph: LogicalGraph, node: Call, name: str, rows: int) -> bool:
    """True if an operand of such a call has the rows in its first dimension."""
    shape = graph.values[name].shape
    rank = max(len(value.shape) for value in node.makes)
    return shape[:1] == (rows,) and (node.op in _DIMS or len(shape) == rank)


def in_blocks(node: Call, shape: tuple[int, int], moved: Callable[[str], Ref]) -> Call:
    """The call on rows in blocks of `shape`; `moved` gives what stands for an operand there.

    Dimensions that count from the back stay, as those after the rows do.
    """

    def arg(value: Arg) -> Arg:
        if isinstance(value, tuple):
            return tuple(arg(part) for part in value)
        return moved(value.name) if isinstance(value, Ref) else value

    def behind(dims: Any) -> Any:
        if isinstance(dims, tuple):
            return tuple(map(behind, dims))
        return dims + 1 if dims >= 0 else dims

    args: list[Any] = [arg(value) for value in node.args]
    if node.op in _DIMS and _DIMS[node.op] < len(args):
        args[_DIMS[node.op]] = behind(args[_DIMS[node.op]])
    if node.op in _SHAPES:
        args[_SHAPES[node.op]] = (*shape, *args[_SHAPES[node.op]][1:])
    return node.changed(args=tuple(args))


_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_KEEPS = ("aten.clone.default", "aten.contiguous.default")


def repeated(graph: LogicalGraph, name: str) -> tuple[str, int] | None:
    """`x` and k for a value [rows, …] that holds each row of x [rows / k, …] k times in a row, k > 1."""
    shape, apart = graph.values[name].shape, graph.producers[name]
    while isinstance(apart, Call) and apart.op in (*_VIEWS, *_KEEPS):
        if len(graph.values[apart.uses[0]].shape) != len(shape) + 1:
            return None
        apart = graph.producers[apart.uses[0]]
    match apart:
        case Call(op="aten.expand.default", args=(Ref(name=one), _, *_)):
            tokens, each, *rest = graph.values[apart.makes[0].name].shape
            maker, there = graph.producers[one], graph.values[one].shape
            fits = tokens * each == shape[0] and tuple(rest) == shape[1:] and each > 1
            if not (fits and there == (tokens, 1, *rest) and isinstance(maker, Call)):
                return None
            x = maker.uses[0] if maker.op in (*_VIEWS, "aten.unsqueeze.default") else one
            return (x, each) if graph.values[x].shape == (tokens, *rest) else None
    return None


def summed(graph: LogicalGraph, node: Node) -> tuple[str, int] | None:
    """The value [rows, …] of which a call makes [rows / k, …], the sums of each k rows, and k > 1."""
    match node:
        case Call(op="aten.sum.dim_IntList", args=(Ref(name=apart), (1,), *keeps), kwargs=()):
            view, (tokens, each, *rest) = graph.producers[apart], graph.values[apart].shape
            if any(keeps) or each < 2 or not (isinstance(view, Call) and view.op in _VIEWS):
                return None
            (x,) = view.uses
            return (x, each) if graph.values[x].shape == (tokens * each, *rest) else None
    return None
