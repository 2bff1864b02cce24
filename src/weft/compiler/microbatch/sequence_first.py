"""Flatten tokens with the sequence dimension first, so that a split sequence stays split.

Linear layers and losses flatten [n, time, …] to [n·time, …]. A split along time is none of the rows
of the result, unless n is 1: every product would gather its rows. So where the user splits time,
and a rank has several sequences, rows are put in another order: time first, within as many groups
of sequences as the ranks along which the batch is split. Split along time they are blocks of rows.

Before: a graph as captured, and the user's hints for the batch. After: an equal graph, in which the
flattening is a view after a transposition, and its inverse a transposition after a view. The ops in
between are those that do not care which row is where, which their rules tell: they may be split
along the rows, and localizing them needs no offset. For any other op the rows are put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import final

from weft.compiler.context import Context
from weft.compiler.graph.rewriting import only_result
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
@dataclass(slots=True)
class _SequenceFirstWriter:
    """Writes the nodes of the new graph.

    Attributes:
        plain: values that are there as they were.
        rows: for a value that is there with its rows by time, the dimension of the rows.
        merged: for a source and a shape, the first value that is the source flattened to it.
        same: for a value that flattens the same source as another value, that value.
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
                # [n, time, …] -> [groups, each, time, …] -> [groups, time, each, …] -> [n·time, …].
                self._plain(node, node.operands[0])
                source, target = self.graph.values[node.operands[0]], only_result(node)
                self.rows[target.name] = 0
                first = self.merged.setdefault((source.name, target.shape), target.name)
                if first == target.name:
                    cut = self.tokens.cut(source.shape[1:], 0)
                    self._turned(node, source, cut, 1, self._moved(target))
                else:
                    self.same[target.name] = first
            elif isinstance(node, Call) and any(name in self.rows for name in node.uses):
                self._call(node)
            else:
                self._as_it_was(node)
        for node in ends:  # calls are before all of them
            for name in node.uses:
                self._plain(node, name)
        self.nodes.extend(ends)
        return replace(self.graph, nodes=tuple(self.nodes))

    def _as_it_was(self, node: Node) -> None:
        for name in dict.fromkeys(node.uses):
            self._plain(node, name)
        self.nodes.append(node)
        self.plain.update(value.name for value in node.makes)

    def _call(self, node: Call) -> None:
        """A call that reads rows by time: on these, if its rule allows; else on rows as they were."""
        names = node.operands
        if parts(self.graph, node, self.tokens) and self.rows.get(names[0]) == 0:
            # [n·time, …] -> [groups, time, each, …] -> [groups, each, time, …] -> [n, time, …].
            target = only_result(node)
            cut = self.tokens.cut_by_time(target.shape[1:], 0)
            self._turned(node, self._moved(self.graph.values[names[0]]), cut, 1, target)
            self.plain.add(target.name)
            return
        here = {i: self.rows[name] for i, name in enumerate(names) if name in self.rows}
        found = None if is_hint(node) else rows_of(node.first, here, self.tokens.rows)
        if found is None:
            self._as_it_was(node)
            return
        renamed: dict[str, str] = {}
        for name, dim in zip(names, found[0], strict=True):
            value = self.graph.values[name]
            if dim is None:
                self._plain(node, name)
                continue
            if name not in self.rows:
                # Rows that are there as they were are put by time.
                cut = self.tokens.cut(value.shape, dim)
                self._turned(node, value, cut, dim + 1, self._moved(value))
                self.rows[name] = dim
            renamed[name] = self._moved(value).name
        outputs: list[Value | None] = []
        for made, dim in zip(node.outputs, found[1], strict=True):
            outputs.append(made and (made if dim is None else self._moved(made)))
            if made is not None and dim is not None:
                self.rows[made.name] = dim
            elif made is not None:
                self.plain.add(made.name)
        call = nodes.renamed(node, renamed)
        assert isinstance(call, Call)  # as it was
        self.nodes.append(call.changed(outputs=tuple(outputs)))

    def _plain(self, node: Node, name: str) -> None:
        """Put rows as they were that are there by time alone."""
        if name in self.plain or name not in self.rows:
            return
        value, dim = self.graph.values[name], self.rows[name]
        cut = self.tokens.cut_by_time(value.shape, dim)
        self._turned(node, self._moved(value), cut, dim + 1, value)
        self.plain.add(name)

    def _turned(
        self, node: Node, source: Value, cut: tuple[int, ...], dim: int, made: Value
    ) -> None:
        """View `source` as `cut`, swap dimensions `dim` and `dim + 1`, and view that as `made`.

        For an output or an update this is beside the call that made the value.
        """
        like = node if isinstance(node, Call) else self.graph.producers[made.name]
        assert isinstance(like, Call)  # what is there by time alone was made by a call
        swapped = (*cut[:dim], cut[dim + 1], cut[dim], *cut[dim + 2 :])
        turns = [
            Value(f"{made.name}.turn{i}", cut if not i else swapped, made.dtype) for i in range(3)
        ]

        def call(op: str, before: Value, after: Value, *args: Arg, **kwargs: Arg) -> None:
            every, options = (before.ref, *args), tuple(kwargs.items())
            where = {"location": like.location, "phase": like.phase}
            self.nodes.append(Call.of(op, every, (after,), kwargs=options, **where))

        call(VIEW, source, turns[0], cut)
        call(TRANSPOSE, turns[0], turns[1], dim, dim + 1)
        call(CLONE, turns[1], turns[2], memory_format=_CONTIGUOUS)
        call(VIEW, turns[2], made, made.shape)

    def _moved(self, value: Value) -> Value:
        return replace(value, name=f"{self.same.get(value.name, value.name)}.by_time")


VIEW, TRANSPOSE, CLONE = "aten.view.default", "aten.transpose.int", "aten.clone.default"
_CONTIGUOUS = Token("memory_format", "contiguous_format")
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
    """The entries of the batch that are split along time while ranks have several sequences."""
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


def _shapes(graph: LogicalGraph, node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes before and after a view; () for other nodes."""
    if not isinstance(node, Call) or node.op not in VIEWS or not isinstance(node.args[0], Ref):
        return (), ()
    return graph.values[node.args[0].name].shape, only_result(node).shape


def merges(graph: LogicalGraph, node: Node, tokens: Tokens) -> bool:
    """True if a node flattens [n, time, …] to [n·time, …]."""
    before, after = _shapes(graph, node)
    return before[:2] == (tokens.n, tokens.time) and after[:1] == (tokens.rows,)


def parts(graph: LogicalGraph, node: Node, tokens: Tokens) -> bool:
    """True if a node makes [n, time, …] of [n·time, …]."""
    before, after = _shapes(graph, node)
    return after[:2] == (tokens.n, tokens.time) and before[:1] == (tokens.rows,)
