"""Rows of tokens by time: what the pass writes, and where it writes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.compiler.deduce import Hints
from weft.compiler.stages import Stages
from weft.compiler.time_first import time_first
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
LINE, GRID = Placement("cpu", (2,), (0, 1)), Placement("cpu", (2, 2), (0, 1, 2, 3))


def _after(placement: Placement, *sbps: SBP) -> str:
    graph = parse_graph(LINEAR)
    hints = {placement.axes: Hints({"x": sbps})}
    return str(verify(time_first(graph, hints, Stages((placement,)))))


def test_on_a_line(golden: Callable[[str, str], None]) -> None:
    """The products and what is element-wise run by time; a running sum wants the rows back."""
    golden(_after(LINE, split(1)), "time_first")


def test_beside_data(golden: Callable[[str, str], None]) -> None:
    """Two groups of two sequences, for the ranks along the first axis."""
    golden(_after(GRID, split(0), split(1)), "time_first_beside_data")


@pytest.mark.parametrize("sbps", [(split(0),), (broadcast,), (split(2),)])
def test_a_batch_whose_time_is_whole(sbps: tuple[SBP, ...]) -> None:
    assert _after(LINE, *sbps) == LINEAR


def test_ranks_with_one_sequence_each() -> None:
    wide = Placement("cpu", (4, 2), tuple(range(8)))
    assert _after(wide, split(0), split(1)) == LINEAR
