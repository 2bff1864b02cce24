"""The cycle ratio of marked graphs, against all simple cycles of small ones."""

from __future__ import annotations

import math
import random
from typing import Any

import networkx as nx
import pytest

from weft.actors.deadlock import Edge, max_cycle_ratio


def by_listing(edges):
    graph: Any = nx.MultiDiGraph()
    for edge in edges:
        graph.add_edge(edge.source, edge.target, edge=edge)
    found = [0.0]
    simple: Any = nx.DiGraph(graph)
    for nodes in nx.simple_cycles(simple):
        choices = [
            [data["edge"] for data in graph[a][b].values()]
            for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)
        ]
        seconds = sum(each[0].seconds for each in choices)
        tokens = sum(min(edge.tokens for edge in each) for each in choices)
        found.append(seconds / tokens if tokens else math.inf if seconds else 0.0)
    return max(found)


@pytest.mark.parametrize("seed", range(60))
def test_ratio_is_that_of_the_worst_cycle(seed):
    draw = random.Random(seed)
    count = draw.randint(2, 7)
    seconds = [draw.randint(0, 9) / 4 for _ in range(count)]
    edges = []
    for _ in range(draw.randint(1, 14)):
        a, b = draw.randrange(count), draw.randrange(count)
        edges.append(Edge(a, b, seconds[a], draw.randint(0 if a < b else 1, 3)))
    ratio, cycle = max_cycle_ratio(edges)
    assert ratio == pytest.approx(by_listing(edges))
    if ratio:
        assert sum(e.seconds for e in cycle) / sum(e.tokens for e in cycle) == pytest.approx(ratio)
        assert [e.target for e in cycle] == [e.source for e in (*cycle[1:], cycle[0])]


def test_a_cycle_without_a_token_stands_still():
    ratio, cycle = max_cycle_ratio([Edge("a", "b", 1.0, 0), Edge("b", "a", 1.0, 0, "why")])
    assert ratio == math.inf
    assert {edge.label for edge in cycle} == {None, "why"}


def test_credits_hide_a_slow_reader():
    """Producer of 1 s, reader of 3 s: with one copy they take turns (4 s), with two the reader alone counts."""

    def loop(credits):
        turns = [Edge("p", "p", 1.0, 1), Edge("r", "r", 3.0, 1)]
        return [*turns, Edge("p", "r", 1.0, 0), Edge("r", "p", 3.0, credits)]

    assert max_cycle_ratio(loop(1))[0] == 4
    assert max_cycle_ratio(loop(2))[0] == 3
