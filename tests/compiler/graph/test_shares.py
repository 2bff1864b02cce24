"""Matrices that join parts, stored in shares of them: which are, and what then stands in the graph."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from interpreter import run
from weft.compiler.context import Context, Stages
from weft.compiler.graph.shares import store_in_shares
from weft.compiler.hints import Hints
from weft.errors import LayoutError
from weft.ir import LogicalGraph, parse_graph, verify
from weft.ir.logical import Input
from weft.layout import SBP, Broadcast, Shares, Split, placement
from weft.tensor.dispatch.interleaved import in_shares

PAIR, GRID = placement("cpu", [0, 1]), placement("cpu", [[0, 1], [2, 3]])
HEAD = """\
graph "joined"
%x = batch "x" : float32[3, 5]
%w = parameter "w" : float32[12, 5]
%b = parameter "b" : float32[12]
%m = state "w.m" : float32[12, 5]
%t = call aten.t.default(%w) : float32[5, 12]
%y = call aten.addmm.default(%b, %x, %t) : float32[3, 12]
"""
TAIL = """\
%gt = call aten.t.default(%gy) : float32[12, 3] {0 backward}
%gw = call aten.mm.default(%gt, %x) : float32[12, 5] {0 backward}
%gb = call aten.sum.dim_IntList(%gy, [0]) : float32[12] {0 backward}
%gx = call aten.mm.default(%gy, %w) : float32[3, 5] {0 backward}
update "SGD" group 0 %w from %gw states %m
update "SGD" group 0 %b from %gb
output "gx" %gx
"""
# Ways to cut [3, 12] into 4 and 8, or into three of 4, and to join the gradients of the parts.
ENDS = {
    "split": """\
%p, %q = call aten.split_with_sizes.default(%y, [4, 8], 1) : float32[3, 4], float32[3, 8]
%gy = call aten.cat.default([%p, %q], 1) : float32[3, 12] {0 backward}
output "p" %p
output "q" %q
""",
    "slices": """\
%p = call aten.slice.Tensor(%y, 1, 0, 4) : float32[3, 4]
%q = call aten.slice.Tensor(%y, 1, 4, 9223372036854775807) : float32[3, 8]
%gp = call aten.slice_backward.default(%p, [3, 12], 1, 0, 4, 1) : float32[3, 12] {0 backward}
%gq = call aten.constant_pad_nd.default(%q, [4, 0], 0.5) : float32[3, 12] {0 backward}
%gy = call aten.add.Tensor(%gp, %gq) : float32[3, 12] {0 backward}
output "p" %p
output "q" %q
""",
    "glu": """\
%p = call aten.glu.default(%y, 1) : float32[3, 6]
%gy = call aten.glu_backward.default(%p, %y, 1) : float32[3, 12] {0 backward}
output "p" %p
""",
    "view": """\
%v = call aten.view.default(%y, [3, 3, 2, 2]) : float32[3, 3, 2, 2]
%v1 = call aten.transpose.int(%v, 0, 1) : float32[3, 3, 2, 2]
%p, %q, %r = call aten.unbind.int(%v1, 0) : float32[3, 2, 2], float32[3, 2, 2], float32[3, 2, 2]
%s = call aten.stack.default([%r, %q, %p], 1) : float32[3, 3, 2, 2] {0 backward}
%gy = call aten.view.default(%s, [3, 12]) : float32[3, 12] {0 backward}
output "p" %p
output "q" %q
""",
}


def graph_of(ends: str) -> LogicalGraph:
    lines = (HEAD + ends + TAIL).splitlines()
    late = [line for line in lines if line.startswith(("update", "output"))]
    late.sort(key=lambda line: line.startswith("output"))
    first = [line for line in lines if not line.startswith(("update", "output"))]
    return verify(parse_graph("\n".join(first + late) + "\n"))


def stored(
    graph: LogicalGraph,
    hints: Mapping[str, tuple[SBP, ...]],
    given: Mapping[str, Shares] | None = None,
) -> LogicalGraph:
    where = GRID if any(len(sbps) == 2 for sbps in hints.values()) else PAIR
    on_grid = {where.axes: Hints(hints, {}, given)}
    context = Context(where, hints=on_grid, stages=Stages((where,)))
    return verify(store_in_shares(graph, context))


def shares_of(graph: LogicalGraph) -> dict[str, Shares]:
    return {node.key: node.shares for node in graph.of_kind(Input) if node.shares}


def assert_equal_steps(graph: LogicalGraph, other: LogicalGraph) -> None:
    """Both make the same, where each gets and gives variables as it stores them."""
    torch.manual_seed(0)
    orders = shares_of(other)
    whole = {(n.role, n.key): torch.randn(n.value.shape) for n in graph.of_kind(Input)}
    apart = {key: in_shares(value, orders.get(key[1])) for key, value in whole.items()}
    expected, found = run(graph, whole), run(other, apart)
    for key, value in expected.outputs.items():
        torch.testing.assert_close(found.outputs[key], value)
    for key, value in expected.updates.items():
        torch.testing.assert_close(found.updates[key], in_shares(value, orders.get(key)))


@pytest.mark.parametrize("ends", ENDS)
def test_the_graph_means_the_same(ends: str) -> None:
    graph = graph_of(ENDS[ends])
    other = stored(graph, {"w": (Split(0),)})
    parts = {"glu": (6, 6), "view": (4, 4, 4)}.get(ends, (4, 8))
    assert shares_of(other) == dict.fromkeys(("w", "b", "w.m"), Shares(0, parts, 2))
    assert_equal_steps(graph, other)


@pytest.mark.parametrize("ends", ENDS)
def test_what_another_program_stores_in_shares(ends: str) -> None:
    """Where it stores only some of what a dimension joins, or in other parts, variables are put in order."""
    graph = graph_of(ENDS[ends])
    for given in (
        dict.fromkeys(("w", "w.m"), Shares(0, (4, 8), 4)),
        dict.fromkeys(("w", "b", "w.m"), Shares(0, (2, 10), 2)),
        dict.fromkeys(("w", "b", "w.m"), Shares(0, (2, 2, 2, 2, 2, 2), 2)),
        {},
    ):
        other = stored(graph, {"w": (Split(0),)}, given)
        assert shares_of(other) == given
        assert_equal_steps(graph, other)


def test_the_ranks_of_a_grid() -> None:
    graph = graph_of(ENDS["split"])
    split = stored(graph, {"w": (Broadcast(), Split(0)), "b": (Broadcast(), Split(0))})
    assert shares_of(split)["w"].blocks == 2
    assert shares_of(stored(graph, {"w": (Split(0), Split(0))}))["w"].blocks == 4


LEFT = {
    "not split": (ENDS["split"], {"w": (Broadcast(),)}),
    "split by inputs": (ENDS["split"], {"w": (Split(1),)}),
    "a bias that is split otherwise": (
        ENDS["split"],
        {"w": (Broadcast(), Split(0)), "b": (Split(0), Split(0))},
    ),
    "parts that ranks do not divide": (
        ENDS["split"].replace("4", "5").replace("8", "7"),
        {"w": (Split(0),)},
    ),
    "pieces that overlap": (
        ENDS["split"] + '%c = call aten.slice.Tensor(%y, 1, 0, 6) : float32[3, 6]\noutput "c" %c\n',
        {"w": (Split(0),)},
    ),
    "the order matters elsewhere": (
        ENDS["split"] + '%c = call aten.cumsum.default(%y, 1) : float32[3, 12]\noutput "c" %c\n',
        {"w": (Split(0),)},
    ),
    "the step returns it": (ENDS["split"] + 'output "y" %y\n', {"w": (Split(0),)}),
    "heads that are not taken one by one": (
        ENDS["view"]
        .replace("unbind.int(%v1, 0)", "unbind.int(%v1, 1)")
        .replace("%r, %q, %p], 1", "%r, %q, %p], 0"),
        {"w": (Split(0),)},
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_stays_in_order(case: str) -> None:
    ends, hints = LEFT[case]
    graph = graph_of(ends)
    assert stored(graph, hints) is graph


def test_shares_that_blocks_do_not_divide() -> None:
    with pytest.raises(LayoutError, match="3 blocks do not divide"):
        Shares(0, (6, 4), 3)
