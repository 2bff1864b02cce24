"""Communicators of a graph's boxings, and which of them are busy at the same time."""

from __future__ import annotations

from weft.compiler.local.localize import communicators, families
from weft.ir import parse_graph

GRAPH = """graph "boxes"
placement @0 = cpu [[0, 1], [2, 3]]
placement @1 = cpu [[4, 5]]
placement @2 = cpu [[0, 1]]
%a = batch "a" : float32[8, 8] @2(B, S(0))
%b = box %a : float32[8, 8] @2(B, B)
%x = batch "x" : float32[8, 8] @0(S(0), S(1))
%y = box %x : float32[8, 8] @0(S(0), B)
%z = box %y : float32[8, 8] @1(B, S(0))
output "b" %b
output "z" %z
"""


def test_groups_of_one_step_are_a_family() -> None:
    graph = parse_graph(GRAPH)
    groups = communicators(graph)
    assert [each.ranks for each in groups] == [(0, 1), (2, 3), (0, 1, 2, 3, 4, 5)]
    assert [each.id for each in groups] == [0, 1, 2]
    # The step on ranks 0 and 1 alone has no company; the one on all four has more.
    assert families(graph, groups) == {0: (0, 1), 1: (0, 1), 2: (2,)}
