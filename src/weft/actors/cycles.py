"""The speed at which a marked graph can turn: the largest ratio of time to tokens over its cycles.

In the long run every node of a marked graph acts once in `max over cycles (seconds / tokens)` and not
faster (Ramchandani, "Analysis of asynchronous concurrent systems by timed Petri nets", 1974). The
ratio is found as Lawler does ("Combinatorial Optimization", 1976, section 3.13: a cycle with
`seconds - ratio * tokens > 0` shows that the ratio is larger), with the ratio of the cycle just
found as the next guess instead of bisection (Dinkelbach 1967), so that it ends at the exact value.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, final

from weft.units import Seconds

Node = TypeVar("Node", bound=Hashable)

# Gains below this part of all seconds are rounding.
_ROUNDING = 1e-12


@final
@dataclass(frozen=True, slots=True)
class Edge(Generic[Node]):
    """`target` acts for the n-th time only after `source` has acted `n - tokens` times.

    Attributes:
        seconds: how long an act of `source` takes.
        label: whatever the caller wants to know of the edge.
    """

    source: Node
    target: Node
    seconds: Seconds
    tokens: int
    label: object = None


def max_cycle_ratio(edges: Sequence[Edge[Node]]) -> tuple[Seconds, tuple[Edge[Node], ...]]:
    """The largest seconds per token over all cycles, and a cycle that has it.

    Returns:
        (0, ()) without a cycle that takes time; infinity and the cycle where one holds no token,
        which means that the graph stands still.
    """
    number: dict[Node, int] = {}
    arcs = [
        (
            number.setdefault(e.source, len(number)),
            number.setdefault(e.target, len(number)),
            e.seconds,
            e.tokens,
        )
        for e in edges
    ]
    ratio = Seconds(0.0)
    best: tuple[Edge[Node], ...] = ()
    while cycle := _cycle_above(edges, arcs, len(number), ratio):
        seconds, tokens = sum(e.seconds for e in cycle), sum(e.tokens for e in cycle)
        if not tokens:
            return Seconds(math.inf), cycle
        if best and seconds / tokens <= ratio:
            break
        ratio, best = Seconds(seconds / tokens), cycle
    return ratio, best


def _cycle_above(
    edges: Sequence[Edge[Node]],
    arcs: Sequence[tuple[int, int, Seconds, int]],
    nodes: int,
    ratio: Seconds,
) -> tuple[Edge[Node], ...]:
    """A cycle whose `seconds - ratio * tokens` is positive; () if there is none. Bellman and Ford's longest paths.

    Args:
        edges: of the graph.
        arcs: the numbers of their sources and targets, their seconds and tokens.
        nodes: their number.
        ratio: seconds per token.
    """
    weighted = [
        (a, b, seconds - ratio * tokens, index)
        for index, (a, b, seconds, tokens) in enumerate(arcs)
    ]
    rounding = _ROUNDING * (sum([abs(weight) for _, _, weight, _ in weighted]) + 1e-300)
    longest = [0.0] * nodes
    via, parents = [-1] * nodes, [-1] * nodes
    for _ in range(nodes + 1):
        changed = False
        for a, b, weight, index in weighted:
            if longest[a] + weight > longest[b] + rounding:
                longest[b], via[b], parents[b], changed = longest[a] + weight, index, a, True
        if not changed:
            return ()
        cycle = _cycle_of(parents)
        if cycle:
            return tuple(edges[via[node]] for node in reversed(cycle))
    return ()


def _cycle_of(parents: Sequence[int]) -> list[int]:
    """A cycle of the graph in which each node has one parent, or -1; from a node to its parent and on."""
    seen = [0] * len(parents)
    for root in range(len(parents)):
        path, node = [], root
        while node >= 0 and not seen[node]:
            seen[node] = root + 1
            path.append(node)
            node = parents[node]
        if node >= 0 and seen[node] == root + 1:
            return path[path.index(node) :]
    return []
