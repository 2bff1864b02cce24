"""Parameters that concatenate several matrices, stored so that a split gives each rank its rows of every matrix.

One matrix may make queries, keys and values, or a gate and what it gates. A plain split of its
rows does not split each part of the output, so activations would have to be sent. Megatron-LM
(section 3) stores such a matrix so that each rank has its rows of every part; so does this pass, in
`Shares` with as many blocks as there are ranks along the split.

Before: a graph without layouts, and hints. After: an equal graph, in which inputs say in which order they are stored.
Calls that do not care about the order stay as they are (`joined_dims.py`); those that cut the dimension into parts,
or join it, do so within each block. Parameters that another program has stored interleaved, and this program
reads in order, are first put back in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias, final

from weft.compiler.context import Context, Stages
from weft.compiler.graph.joined_dims import CAT, SLICE, JoinedDim, in_blocks, joined_dim
from weft.compiler.hints import Hints
from weft.ir.logical import Arg, Call, Input, LogicalGraph, Node, Output, Phase, Ref, Update, Value
from weft.ir.nodes import renamed
from weft.layout import Shares, Split
from weft.ops.call import Operand, map_argument

RESHAPE = "aten.reshape.default"

# The shares of dimensions, and where each goes.
SharedDims: TypeAlias = "list[tuple[Shares, JoinedDim]]"


def store_in_shares(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph with variables in shares: those for which that pays, or those that another program has so."""
    hints, stages = context.hints, context.stages
    decided = [own.shares for own in hints.values() if own.shares is not None]
    if decided:
        given = {key: shares for own in decided for key, shares in own.items()}
        inputs = {n.value.name: n for n in graph.of_kind(Input) if n.key in given}
        dims: SharedDims = []
        known: set[str] = set()
        for name, node in inputs.items():
            shares = given[node.key]
            joined = None if name in known else joined_dim(graph, name, shares.dim)
            if joined is not None and _agree(graph, joined, shares, given):
                dims.append((shares, joined))
                known.update(joined.dims)
        graph = with_shares(graph, dims)
        rest = {name: given[node.key] for name, node in inputs.items() if name not in known}
        return in_order(graph, rest, stages) if rest else graph
    search = _UnfitSearch(graph, hints, stages)
    unfit = [each for node in graph.of_kind(Input) for each in search.of(node)]
    return with_shares(graph, unfit)


def _agree(
    graph: LogicalGraph, joined: JoinedDim, shares: Shares, given: Mapping[str, Shares]
) -> bool:
    """True if every variable that has a dimension is stored in the same shares, of the parts that are cut."""
    variables = (n for n in graph.of_kind(Input) if n.value.name in joined.dims)
    return joined.pieces <= shares.pieces and all(
        given.get(node.key) == replace(shares, dim=joined.dims[node.value.name])
        for node in variables
    )


@final
@dataclass
class _UnfitSearch:
    """Looks for parameters whose split is none of the parts."""

    graph: LogicalGraph
    hints: Mapping[int, Hints]
    stages: Stages
    seen: set[tuple[str, int]] = field(default_factory=set)

    def of(self, node: Input) -> Iterator[tuple[Shares, JoinedDim]]:
        """The dimensions of a variable that were not followed yet."""
        splits = self._splits(node) if node.role == "parameter" else {}
        for dim, ranks in splits.items():
            if (node.value.name, dim) in self.seen:
                continue
            joined = joined_dim(self.graph, node.value.name, dim)
            if joined is None:
                continue
            self.seen.update(joined.dims.items())
            if self._fits(joined, ranks):
                yield Shares(dim, joined.parts, ranks), joined

    def _splits(self, node: Input) -> dict[int, int]:
        placement = self.stages.placements[self.stages.homes.get(node.key, 0)]
        sbps = self.hints[placement.axes].inputs.get(node.key, ())
        dims = dict.fromkeys(sbp.dim for sbp in sbps if isinstance(sbp, Split))
        return {
            dim: prod(
                ranks for ranks, sbp in zip(placement.shape, sbps, strict=True) if sbp == Split(dim)
            )
            for dim in dims
        }

    def _fits(self, joined: JoinedDim, ranks: int) -> bool:
        """True if there are several parts, which the ranks divide, and no variable is split otherwise."""
        splits = (
            self._splits(node).get(joined.dims[node.value.name], ranks)
            for node in self.graph.of_kind(Input)
            if node.value.name in joined.dims
        )
        return (
            ranks > 1
            and len(joined.parts) > 1
            and all(part % ranks == 0 for part in joined.parts)
            and all(other == ranks for other in splits)
        )


def in_order(graph: LogicalGraph, stored: Mapping[str, Shares], stages: Stages) -> LogicalGraph:
    """The graph with variables put in order for what reads them, and in shares for what updates them."""
    inputs = [
        replace(n, shares=stored[n.value.name]) if n.value.name in stored else n
        for n in graph.of_kind(Input)
    ]
    readers = (node for node in graph.nodes if isinstance(node, Call | Output))
    # States that only their update reads have no values before the first one.
    read = {name for node in readers for name in node.uses} & stored.keys()
    calls: list[Node] = []
    names: dict[str, str] = {}
    for node in inputs:
        if node.value.name in read:
            phase = Phase(stages.homes.get(node.key, 0), "forward")
            whole = replace(node.value, name=f"{node.value.name}.in_order")
            calls += _moved(node.value, whole, stored[node.value.name], phase, back=True)
            names[node.value.name] = whole.name
    keys = {node.value.name: node.key for node in inputs}
    ends: list[Node] = []
    for node in graph.nodes:
        if isinstance(node, Update) and node.target.name in stored:
            source = graph.values[node.source.name]
            shared = replace(source, name=f"{source.name}.in_shares{len(ends)}")
            maker = graph.producers[source.name]
            home = Phase(stages.homes.get(keys[node.target.name], 0), "forward")
            phase = maker.phase if isinstance(maker, Call) else home
            calls += _moved(source, shared, stored[node.target.name], phase, back=False)
            ends.append(replace(node, source=shared.ref))
        elif isinstance(node, Update | Output):
            ends.append(renamed(node, names))
        elif isinstance(node, Call):
            calls.append(renamed(node, names) if not names.keys().isdisjoint(node.uses) else node)
    return replace(graph, nodes=(*inputs, *calls, *ends))


def _moved(source: Value, made: Value, shares: Shares, phase: Phase, back: bool) -> Iterator[Call]:
    dim, blocks = shares.dim, shares.blocks

    def call(op: str, args: tuple[Arg, ...], name: str, shape: tuple[int, ...]) -> Call:
        value = replace(source, name=name, shape=shape) if name != made.name else made
        return Call.of(op, args, (value,), phase=phase)

    def ref(name: str, shape: tuple[int, ...]) -> Ref:
        return replace(source, name=name, shape=shape).ref

    def with_size(*sizes: int) -> tuple[int, ...]:
        return (*source.shape[:dim], *sizes, *source.shape[dim + 1 :])

    whole, pieces = source.ref, []
    if back:
        yield call(
            RESHAPE,
            (whole, shares.in_blocks(source.shape)),
            f"{made.name}.blocks",
            shares.in_blocks(source.shape),
        )
        whole = ref(f"{made.name}.blocks", shares.in_blocks(source.shape))
    start = 0
    for number, part in enumerate(shares.parts):
        piece, turned = f"{made.name}.part{number}", f"{made.name}.part{number}.turned"
        cut, length = (dim + 1, part // blocks) if back else (dim, part)
        shapes = with_size(blocks, part // blocks), with_size(part)
        before, after = shapes if back else shapes[::-1]
        yield call(SLICE, (whole, cut, start, start + length), piece, before)
        yield call(RESHAPE, (ref(piece, before), after), turned, after)
        start += length
        pieces.append(ref(turned, after))
    if back:
        yield call(CAT, (tuple(pieces), dim), made.name, made.shape)
        return
    blocked = f"{made.name}.blocks"
    yield call(CAT, (tuple(pieces), dim + 1), blocked, shares.in_blocks(source.shape))
    yield call(
        RESHAPE, (ref(blocked, shares.in_blocks(source.shape)), made.shape), made.name, made.shape
    )


def with_shares(graph: LogicalGraph, dims: SharedDims) -> LogicalGraph:
    """The graph whose inputs have these dimensions in shares; equal, as its calls work within blocks."""
    return _BlocksWriter(graph, dims).written() if dims else graph


@final
@dataclass
class _BlocksWriter:
    graph: LogicalGraph
    shared_dims: SharedDims
    nodes: list[Node] = field(default_factory=list)

    def written(self) -> LogicalGraph:
        """The new graph."""
        order = {
            name: replace(shares, dim=dim)
            for shares, joined in self.shared_dims
            for name, dim in joined.dims.items()
        }
        ends = {name for _, joined in self.shared_dims for name in joined.ends}
        for node in self.graph.nodes:
            made = node.makes
            if isinstance(node, Input) and node.value.name in order:
                node = replace(node, shares=order[node.value.name])
            if isinstance(node, Call) and made and made[0].name in ends:
                self._end(node, order)
            else:
                self.nodes.append(node)
        return replace(self.graph, nodes=tuple(self.nodes))

    def _end(self, node: Call, order: Mapping[str, Shares]) -> None:
        names = (*node.uses, *(value.name for value in node.makes))
        instead = in_blocks(node.first, next(order[name] for name in names if name in order))
        refs: list[Ref] = []
        for name, shape in zip(node.operands, instead.operands, strict=True):
            source = self.graph.values[name]
            made = replace(source, name=f"{node.makes[0].name}.of{len(refs)}", shape=shape)
            self._reshape(node, source, made)
            refs.append(made.ref)

        def leaf(arg: Any) -> Any:
            return refs[arg.index] if isinstance(arg, Operand) else arg

        outputs = tuple(
            replace(value, name=f"{value.name}.in_blocks", shape=shape)
            for value, shape in zip(node.makes, instead.results, strict=True)
        )
        args = map_argument(leaf, instead.args)
        self.nodes.append(node.changed(op=instead.op, args=args, kwargs=(), outputs=outputs))
        for made, value in zip(outputs, node.makes, strict=True):
            self._reshape(node, made, value)

    def _reshape(self, node: Call, source: Value, made: Value) -> None:
        args = (source.ref, made.shape)
        self.nodes.append(node.changed(op=RESHAPE, args=args, kwargs=(), outputs=(made,)))
