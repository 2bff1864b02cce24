"""Which values of a graph are made once per micro-batch, and how those come that are not made."""

from __future__ import annotations

from weft.compiler.microbatch.facts import cut_leaves, join_per_micro_batch
from weft.ir.logical import PerMicroBatch
from weft.ir.parse import parse_graph
from weft.ops import OpCall

GRAPH = """graph "step" micro 2
%w = parameter "w" : float32[4, 3]
%count = buffer "count" : int64[]
%x = batch "x" cut : float32[2, 5, 4]
%t = call aten.t.default(%w) : float32[3, 4]
%x.micro = call aten.select.int(%x, 0, vary(0, 1)) : float32[5, 4]
%y = call aten.mm.default(%x.micro, %w) : float32[5, 3]
%s = call aten.sum.default(%y) : float32[]
%s.all = call weft.accumulate(%s, "sum") : float32[]
%twice = call aten.add.Tensor(%s.all, %s.all) : float32[]
%held = call weft.use(%count, vary(0, 1)) : int64[]
update "copy" group 0 %count from %held
output "loss" %twice
"""


def test_what_depends_on_a_micro_batch_is_made_in_the_loop() -> None:
    graph = parse_graph(GRAPH)
    assert str(graph) == GRAPH
    assert graph.loop == {"x.micro", "y", "s", "held"}
    assert cut_leaves(graph) == {"x"}


def test_arguments_join_and_come_apart() -> None:
    parts = ((2, (0, 5)), (2, (5, 5)))
    assert join_per_micro_batch(parts) == (2, (PerMicroBatch((0, 5)), 5))
    call = OpCall("aten.add.Tensor", join_per_micro_batch(parts), (), (), ())
    assert [call.at(micro).args for micro in (0, 1)] == list(parts)
    assert join_per_micro_batch((True, 1)) == PerMicroBatch((True, 1))


def test_what_another_stage_sends_for_each_micro_batch_is_of_the_loop() -> None:
    text = GRAPH.replace('%w = parameter "w"', '%w = batch "w" sent each').replace(
        "%x.micro, %w", "%w, %w"
    )
    assert parse_graph(text).loop == {"w", "t", "x.micro", "y", "s", "held"}
    assert "t" not in parse_graph(text.replace("each", "once")).loop
