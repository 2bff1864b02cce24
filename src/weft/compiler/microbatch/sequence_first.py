"""Flattened tokens in the order of time, so that a sequence that is split stays split.

Linear layers and losses flatten [n, time, …] to [n·time, …]. A split along time is none of the rows
of the result, unless n is 1: every product would gather its rows. So where the user splits time,
and a rank has several sequences, rows are put in another order: time first, within as many groups
of sequences as the ranks along which the batch is split. Split along time they are blocks of rows.

Before: a graph as captured, and the user's hints for the batch. After: an equal graph, in which the
flattening is a view behind a transposition, and its inverse a transposition behind a view. The ops in
between are those that do not care which row stands where, which their rules tell: they may be split
along the rows, and localizing them needs no offset. For any other op the rows are put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import final

from weft.compiler.context import Context
from weft.compiler.hints import Hints, is_hint
from weft.ir import nodes
from weft.ir.logical import Arg, Call, Input, LogicalGraph, Node, Output, Ref, Update, Value
from weft.layout import Placement, Split
from weft.ops.any_order import rows_of
from weft.ops.call import Token
from weft.ops.rule import aten


def sequence_first(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph with rows of tokens by time, where the hints split time and that keeps them split."""
    known = (
        each
        for placement in context.stages.placements
        for each in tokens_of(graph, context.hints[placement.axes], placement)
    )
    for tokens in dict.fromkeys(known):
        if any(merges(graph, node, tokens) for node in graph.nodes):
            graph = _SequenceFirstWriter(graph, tokens).written()
    return graph


@final
@dataclass
class _SequenceFirstWriter:
    """Writes the nodes of the new graph.

    Attributes:
        plain: values that are there as they were.
        rows: for a value that is there with its rows by time, the dimension of the rows.
        merged: for a source and a shape, the first value that is the source flattened to it.
        same: for a value that flattens what another one did, that one.
    """

    graph: LogicalGraph
    tokens: Tokens
    nodes: list[Node] = field(default_factory=list)
    plain: set[str] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)
    merged: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)

    def written(self) -> LogicalGraph:
        """The new graph."""
        ends = [node for node in self.graph.nodes if isinstance(node, (Update, Output))]
        for node in self.graph.nodes[: len(self.graph.nodes) - len(ends)]:
            if isinstance(node, Call) and merges(self.graph, node, self.tokens):
                self._merge(node)
            elif isinstance(node, Call) and any(name in self.rows for name in node.uses):
                self._call(node)
            else:
                self._as_it_was(node)
        for node in ends:  # calls stand before all of them
            for name in node.uses:
                self._plain(node, name)
        self.nodes.extend(ends)
        return replace(self.graph, nodes=tuple(self.nodes))

    def _as_it_was(self, node: Node) -> None:
        for name in dict.fromkeys(node.uses):
            self._plain(node, name)
        self.nodes.append(node)
        outputs: Iterable[Value | None] = ()
        if isinstance(node, Call):
            outputs = node.outputs
        elif isinstance(node, Input):
            outputs = (node.value,)
        self.plain.update(value.name for value in outputs if value is not None)

    def _call(self, node: Call) -> None:
        """A call that reads rows by time: on these, if its rule allows; else on rows as they were."""
        if parts(self.graph, node, self.tokens) and self.rows.get(node.operands[0]) == 0:
            self._part(node)
            return
        found = self._by_rows(node)
        if found is None:
            self._as_it_was(node)
            return
        of_operands, of_results = found
        for name, dim in of_operands.items():
            if dim is None:
                self._plain(node, name)
            else:
                self._by_time(node, name, dim)
        renamed = {
            name: self._moved(self.graph.values[name]).name
            for name, dim in of_operands.items()
            if dim is not None
        }
        outputs: list[Value | None] = []
        for value, dim in zip(node.outputs, of_results, strict=True):
            if value is not None and dim is not None:
                self.rows[value.name] = dim
                value = self._moved(value)
            elif value is not None:
                self.plain.add(value.name)
            outputs.append(value)
        call = nodes.renamed(node, renamed)
        assert isinstance(call, Call)  # as it was
        self.nodes.append(call.changed(outputs=tuple(outputs)))

    def _by_rows(self, node: Call) -> tuple[dict[str, int | None], tuple[int | None, ...]] | None:
        """The dimension of the rows in each operand and result; None when rows must stand as they were."""
        if is_hint(node):
            return None
        names = node.operands
        here = {i: self.rows[name] for i, name in enumerate(names) if name in self.rows}
        found = rows_of(node.first, here, self.tokens.rows)
        return found and (dict(zip(names, found[0], strict=True)), found[1])

    def _merge(self, node: Call) -> None:
        """[n, time, …] -> [groups, each, time, …] -> [groups, time, each, …] -> [n·time, …]."""
        self._plain(node, node.operands[0])
        source, target = self.graph.values[node.operands[0]], node.outputs[0]
        assert target is not None
        self.rows[target.name] = 0
        first = self.merged.setdefault((source.name, target.shape), target.name)
        if first != target.name:
            self.same[target.name] = first
            return
        cut = self.tokens.cut(source.shape[1:], 0)
        self._turned(node, source, cut, 1, self._moved(target))

    def _part(self, node: Call) -> None:
        """[n·time, …] -> [groups, time, each, …] -> [groups, each, time, …] -> [n, time, …]."""
        source, target = self.graph.values[node.operands[0]], node.outputs[0]
        assert target is not None
        cut = self.tokens.cut_by_time(target.shape[1:], 0)
        self._turned(node, self._moved(source), cut, 1, target)
        self.plain.add(target.name)

    def _plain(self, node: Node, name: str) -> None:
        if name in self.plain or name not in self.rows:
            return
        value, dim = self.graph.values[name], self.rows[name]
        cut = self.tokens.cut_by_time(value.shape, dim)
        self._turned(node, self._moved(value), cut, dim + 1, value)
        self.plain.add(name)

    def _by_time(self, node: Node, name: str, dim: int) -> None:
        """Put rows by time that are there as they were."""
        if name in self.rows:
            return
        value = self.graph.values[name]
        cut = self.tokens.cut(value.shape, dim)
        self._turned(node, value, cut, dim + 1, self._moved(value))
        self.rows[name] = dim

    def _turned(
        self, node: Node, source: Value, cut: tuple[int, ...], dim: int, made: Value
    ) -> None:
        """View `source` as `cut`, swap dimensions `dim` and `dim + 1`, and view that as `made`."""
        like = node if isinstance(node, Call) else self._maker(made)
        self.nodes.extend(turned(like, source, cut, dim, made))

    def _moved(self, value: Value) -> Value:
        return replace(value, name=f"{self.same.get(value.name, value.name)}.by_time")

    def _maker(self, value: Value) -> Call:
        """The call that made a value of the old graph: what an output or an update reads is put back beside it."""
        maker = self.graph.producers[value.name]
        assert isinstance(maker, Call)  # what is there by time alone was made by a call
        return maker


VIEW, TRANSPOSE, CLONE = "aten.view.default", "aten.transpose.int", "aten.clone.default"
_CONTIGUOUS = Token("memory_format", "contiguous_format")


def turned(
    like: Call, source: Value, cut: tuple[int, ...], dim: int, made: Value
) -> Iterator[Call]:
    """View `source` as `cut`, swap dimensions `dim` and `dim + 1`, and view that as `made`; where `like` stands."""
    swapped = (*cut[:dim], cut[dim + 1], cut[dim], *cut[dim + 2 :])
    turns = [Value(f"{made.name}.turn{i}", cut if not i else swapped, made.dtype) for i in range(3)]

    def call(op: str, before: Value, after: Value, *args: Arg, **kwargs: Arg) -> Call:
        arguments = (before.ref, *args)
        return Call.of(
            op,
            arguments,
            (after,),
            kwargs=tuple(kwargs.items()),
            location=like.location,
            phase=like.phase,
        )

    yield call(VIEW, source, turns[0], cut)
    yield call(TRANSPOSE, turns[0], turns[1], dim, dim + 1)
    yield call(CLONE, turns[1], turns[2], memory_format=_CONTIGUOUS)
    yield call(VIEW, turns[2], made, made.shape)


VIEWS = frozenset(aten("view _unsafe_view reshape"))


@final
@dataclass(frozen=True)
class Tokens:
    """`n` sequences of `time` tokens, in `groups` groups of equally many sequences."""

    n: int
    time: int
    groups: int

    @property
    def rows(self) -> int:
        """The number of tokens."""
        return self.n * self.time

    @property
    def each(self) -> int:
        """Sequences of a group."""
        return self.n // self.groups

    def cut(self, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """A shape with rows along `dim` as they were, cut into groups, sequences and time."""
        return (*shape[:dim], self.groups, self.each, self.time, *shape[dim + 1 :])

    def cut_by_time(self, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """A shape with rows along `dim` by time, cut into groups, time and sequences."""
        return (*shape[:dim], self.groups, self.time, self.each, *shape[dim + 1 :])


def tokens_of(graph: LogicalGraph, hints: Hints, placement: Placement) -> Iterator[Tokens]:
    """The leaves of the batch that are split along time while ranks have several sequences."""
    for node in graph.of_kind(Input):
        sbps = hints.inputs.get(node.key, ()) if node.role == "batch" else ()
        for sbp in sbps:
            if not isinstance(sbp, Split) or not sbp.dim:
                continue
            n, time = node.value.shape[sbp.dim - 1 : sbp.dim + 1]
            pairs = zip(sbps, placement.shape, strict=True)
            groups = prod(parts for other, parts in pairs if other == Split(sbp.dim - 1))
            if n > groups and n % groups == 0:
                yield Tokens(n, time, groups)


def _shapes(graph: LogicalGraph, node: Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if not isinstance(node, Call) or node.op not in VIEWS or not isinstance(node.args[0], Ref):
        return None
    made = node.outputs[0]
    return (graph.values[node.args[0].name].shape, made.shape) if made else None


def merges(graph: LogicalGraph, node: Node, tokens: Tokens) -> bool:
    """True where a node flattens [n, time, …] to [n·time, …]."""
    shapes = _shapes(graph, node)
    return (
        shapes is not None
        and shapes[0][:2] == (tokens.n, tokens.time)
        and shapes[1][:1] == (tokens.rows,)
    )


def parts(graph: LogicalGraph, node: Node, tokens: Tokens) -> bool:
    """True where a node makes [n, time, …] of [n·time, …]."""
    shapes = _shapes(graph, node)
    return (
        shapes is not None
        and shapes[1][:2] == (tokens.n, tokens.time)
        and shapes[0][:1] == (tokens.rows,)
    )
