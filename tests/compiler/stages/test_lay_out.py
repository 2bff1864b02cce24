"""A graph of other sizes takes its layouts over from one that was deduced, where they fit."""

from __future__ import annotations

import pytest

from weft.compiler import pipeline
from weft.compiler.context import Options
from weft.compiler.hints import Hints
from weft.compiler.local.overlap import BatchCut
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.stages.lay_out import signatures_before
from weft.ir import LogicalGraph, parse_graph
from weft.ir.logical import Call
from weft.layout import SBP, Broadcast, Placement, Split, placement

PAIR = placement("cpu", [0, 1])
WHOLE, ROWS, COLUMNS = (Broadcast(),), (Split(0),), (Split(1),)
TENSORS: dict[str, tuple[SBP, ...]] = {"x": WHOLE, "up": COLUMNS, "down": ROWS}
DATA: dict[str, tuple[SBP, ...]] = {"x": ROWS, "up": WHOLE, "down": WHOLE}
SLICE = "%cut = call aten.slice.Tensor(%p, 0, 0, {rows}) : float32[{rows}, 6]\n"

# A step of two layers; positions are added, of which there are as many as rows, or more.
STEP = """\
graph "pair"
%u = parameter "up" : float32[6, 6]
%d = parameter "down" : float32[6, 6]
%p = buffer "positions" : float32[{table}, 6]
%x = batch "x" : float32[{rows}, 6]
{slice}%e = call aten.add.Tensor(%x, %{positions}) : float32[{rows}, 6]
%a = call aten.mm.default(%e, %u) : float32[{rows}, 6] at "m.py":1 in "up"
%h = call aten.{op}.default(%a) : float32[{rows}, 6]
%y = call aten.mm.default(%h, %d) : float32[{rows}, 6] at "m.py":2 in "down"
%loss = call aten.sum.default(%y) : float32[]
%t = call aten.t.default(%h) : float32[6, {rows}] at "m.py":2 in "down" backward
%gd = call aten.mm.default(%t, %y) : float32[6, 6] at "m.py":2 in "down" backward
update "SGD" group 0 %d from %gd
output "loss" %loss
"""


def step(rows: int, table: int = 32, op: str = "relu") -> LogicalGraph:
    cut = SLICE.format(rows=rows) if table > rows else ""
    name = "cut" if cut else "p"
    text = STEP.format(rows=rows, table=table, op=op, slice=cut, positions=name)
    return parse_graph(text)


def compiled(
    graph: LogicalGraph,
    layouts: dict[str, tuple[SBP, ...]],
    like: Compiled | None = None,
    ranks: Placement = PAIR,
) -> Compiled:
    hints = Hints(layouts | {"positions": WHOLE * ranks.axes})
    return compile_graph(graph, hints, ranks, ranks.ranks, like=like)


def taken(found: Compiled) -> bool:
    return all(each.taken for each in found.deduced)


@pytest.mark.parametrize("layouts", [TENSORS, DATA])
@pytest.mark.parametrize(("first", "second"), [(16, 12), (12, 16), (32, 20), (20, 32)])
def test_layouts_are_taken_over(
    layouts: dict[str, tuple[SBP, ...]],
    first: int,
    second: int,
) -> None:
    """The plan is that of a compile from nothing; a slice that only one of the two has is no matter."""
    fresh = compiled(step(second), layouts)
    like = compiled(step(first), layouts)
    found = compiled(step(second), layouts, like)
    assert taken(found)
    assert not taken(fresh)
    assert str(found.graph) == str(fresh.graph)
    assert found.plan == fresh.plan
    assert found.fingerprint == fresh.fingerprint


def test_layouts_are_taken_over_on_a_grid() -> None:
    grid = placement("cpu", [[0, 1], [2, 3]])
    layouts = {key: (*DATA[key], *TENSORS[key]) for key in DATA}
    like = compiled(step(16), layouts, ranks=grid)
    found = compiled(step(20), layouts, like, grid)
    assert taken(found)
    assert found.plan == compiled(step(20), layouts, ranks=grid).plan


@pytest.mark.parametrize(
    ("rows", "op", "why"),
    [(7, "relu", "sizes"), (33, "relu", "sizes"), (16, "tanh", "an op")],
)
def test_what_differs_in_more_is_deduced_anew(rows: int, op: str, why: str) -> None:
    like, other = compiled(step(16, 64), DATA), step(rows, 64, op)
    assert not signatures_before(like.deduced[0], other, like.deduced[0].hints, PAIR), why
    found = compiled(other, DATA, like)
    assert not taken(found), why
    assert found.plan == compiled(other, DATA).plan


@pytest.mark.parametrize(("rows", "fits"), [(1, False), (2, True), (3, True)])
def test_layouts_that_leave_a_rank_without_rows_are_deduced_anew(rows: int, fits: bool) -> None:
    layouts = {key: sbps for key, sbps in DATA.items() if key != "x"}
    like = compiled(step(2), DATA)  # asks for the split; the other leaves it free
    assert taken(compiled(step(rows), layouts, like)) is fits


def test_other_hints_are_kept() -> None:
    """What a hint says now counts, not where the other graph's input lay."""
    like = compiled(step(16), DATA)
    assert not taken(compiled(step(12), TENSORS, like))


def test_a_batch_that_was_weighed_is_not_weighed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    like = compiled(step(16), TENSORS)
    assert like.cut == BatchCut()
    assert like.cut is not None
    assert like.cut.weighed
    monkeypatch.setattr(pipeline, "best_cut", None)
    assert compiled(step(12), TENSORS, like).cut == BatchCut()


def test_a_batch_that_could_not_be_cut_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not lie evenly say nothing about others that do."""
    like = compiled(step(15), DATA)
    weighed: list[object] = []
    monkeypatch.setattr(pipeline, "best_cut", lambda *_: weighed.append(_) or BatchCut())
    found = compiled(step(16), DATA, like)
    assert taken(found)
    assert weighed


def test_stages_stay_as_they_were_cut() -> None:
    """Homes of parameters do not say on which side of a border the calls between lie; the first cut does."""
    options = Options(stages=2)
    ranks = placement("cpu", [0, 1])
    like = compile_graph(step(16), Hints(), ranks, (0, 1), options)
    phases = {node.makes[0].name: node.phase for node in like.graph.of_kind(Call)}
    again = compile_graph(step(12), Hints(), ranks, (0, 1), options, like.stages.homes, like=like)
    assert taken(again)
    assert {node.makes[0].name: node.phase for node in again.graph.of_kind(Call)} == phases
    alone = compile_graph(step(12), Hints(), ranks, (0, 1), options, like.stages.homes)
    assert {node.makes[0].name: node.phase for node in alone.graph.of_kind(Call)} != phases
