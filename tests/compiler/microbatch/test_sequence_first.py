"""Rows of tokens by time: where the pass writes nothing."""

from __future__ import annotations

import pytest

from contexts import hinted
from weft.compiler.microbatch.sequence_first import sequence_first
from weft.ir import parse_graph, verify
from weft.layout import SBP, Placement, broadcast, split

LINEAR = """\
graph "linear"
%x = batch "x" : float32[4, 6, 8]
%w = parameter "w" : float32[8, 8]
%rows = call aten.view.default(%x, [24, 8]) : float32[24, 8]
%product = call aten.mm.default(%rows, %w) : float32[24, 8]
%relu = call aten.relu.default(%product) : float32[24, 8]
%back = call aten.view.default(%relu, [4, 6, 8]) : float32[4, 6, 8]
%after = call aten.cumsum.default(%relu, 0) : float32[24, 8]
output "back" %back
output "after" %after
output "relu" %relu
"""
LINE = Placement("cpu", (2,), (0, 1))


def _after(placement: Placement, *sbps: SBP) -> str:
    graph = parse_graph(LINEAR)
    return str(verify(sequence_first(graph, hinted(placement, {"x": sbps}))))


@pytest.mark.parametrize("sbps", [(split(0),), (broadcast,), (split(2),)])
def test_a_batch_whose_time_is_whole(sbps: tuple[SBP, ...]) -> None:
    assert _after(LINE, *sbps) == LINEAR


def test_ranks_with_one_sequence_each() -> None:
    wide = Placement("cpu", (4, 2), tuple(range(8)))
    assert _after(wide, split(0), split(1)) == LINEAR
