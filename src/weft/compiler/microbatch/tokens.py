"""Flattened tokens of a batch whose time hints split, and the views that flatten them and take them apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import final

from weft.compiler.hints import Hints
from weft.ir.logical import Call, Input, LogicalGraph, Node, Ref
from weft.layout import Placement, Split
from weft.ops.rule import aten

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
    """From which shape to which a view takes its operand."""
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
