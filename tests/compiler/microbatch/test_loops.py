"""Which values of a graph are made once per micro-batch."""

from __future__ import annotations

from weft.compiler.microbatch.loops import at_micro_batch, cut_leaves, joined, loop_values
from weft.ir.logical import Varying
from weft.ir.parser import parse_graph

GRAPH = """graph "step" micro 2
%w = parameter "w" : float32[4, 3]
%count = buffer "count" : int64[]
%x = batch "x" : float32[2, 5, 4]
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
    assert loop_values(graph) == {"x.micro", "y", "s", "held"}
    assert cut_leaves(graph) == {"x"}


def test_arguments_join_and_come_apart() -> None:
    parts = ((2, (0, 5)), (2, (5, 5)))
    assert joined(parts) == (2, (Varying((0, 5)), 5))
    assert [at_micro_batch(joined(parts), m) for m in (0, 1)] == list(parts)
    assert joined((True, 1)) == Varying((True, 1))


def test_a_leaf_is_cut_also_where_it_is_boxed_first() -> None:
    boxed = GRAPH.replace(
        "%x.micro = call aten.select.int(%x,",
        "%x.box0 = box %x : float32[2, 5, 4]\n%x.micro = call aten.select.int(%x.box0,",
    )
    assert cut_leaves(parse_graph(boxed)) == {"x"}
