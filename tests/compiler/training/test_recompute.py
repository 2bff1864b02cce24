"""Recompute on a small graph: what is made again, where, and after what."""

from __future__ import annotations

import pytest

from contexts import asked
from weft.compiler.training.recompute import recompute
from weft.errors import StrategyError
from weft.ir import parse_graph, verify
from weft.ir.logical import Call, LogicalGraph

# Two blocks of dropout and a product, then a loss; as autograd leaves them.
GRAPH = """
graph "blocks"
%w = parameter "w" : float32[4]
%x = batch "x" : float32[4]
%u0 = call weft.uniform([4], [0], [4], 0) : float32[4] at "m.py":1 in "blocks.0.drop"
%d0 = call aten.mul.Tensor(%x, %u0) : float32[4] at "m.py":1 in "blocks.0.drop"
%y0 = call aten.mul.Tensor(%d0, %w) : float32[4] at "m.py":1 in "blocks.0"
%u1 = call weft.uniform([4], [0], [4], 1) : float32[4] at "m.py":1 in "blocks.1.drop"
%d1 = call aten.mul.Tensor(%y0, %u1) : float32[4] at "m.py":1 in "blocks.1.drop"
%y1 = call aten.mul.Tensor(%d1, %w) : float32[4] at "m.py":1 in "blocks.1"
%e = call aten.exp.default(%y1) : float32[4] at "m.py":2
%g2 = call aten.mul.Tensor(%e, 2.0) : float32[4] {0 backward}
%gw1 = call aten.mul.Tensor(%g2, %d1) : float32[4] {0 backward}
%gd1 = call aten.mul.Tensor(%g2, %w) : float32[4] {0 backward}
%g1 = call aten.mul.Tensor(%gd1, %u1) : float32[4] {0 backward}
%m0 = call aten.gt.Scalar(%d0, 0) : bool[4] {0 backward}
%gm = call aten.mul.Tensor(%g1, %m0) : float32[4] {0 backward}
%gw0 = call aten.mul.Tensor(%gm, %d0) : float32[4] {0 backward}
%gw = call aten.add.Tensor(%gw0, %gw1) : float32[4] {0 backward}
update "SGD" group 0 %w from %gw
output "loss" %e
"""


def made(graph: LogicalGraph) -> list[str]:
    return [value.name for call in graph.of_kind(Call) for value in call.outputs if value]


def uses(graph: LogicalGraph, name: str) -> tuple[str, ...]:
    return graph.producers[name].uses


def test_each_block_is_a_region() -> None:
    graph = verify(recompute(parse_graph(GRAPH), asked(recompute=["blocks.*"])))
    names = made(graph)
    # Copies stand right before the first call of the backward that reads them, draws included.
    assert names[names.index("g2") + 1 : names.index("gw1")] == ["u1.again", "y0.held0", "d1.again"]
    assert names[names.index("g1") + 1 : names.index("m0")] == ["u0.again", "d0.again"]
    assert graph.producers["u1.again"].args == graph.producers["u1"].args  # type: ignore[union-attr]
    # What a block hands on is kept, and read when the gradient is there.
    assert "y0.again" not in names
    assert uses(graph, "y0.held0") == ("y0", "g2")
    assert uses(graph, "d1.again") == ("y0.held0", "u1.again")
    assert uses(graph, "gw1") == ("g2", "d1.again")
    assert uses(graph, "g1") == ("gd1", "u1.again")
    # Batch and parameters are there anyway.
    assert uses(graph, "d0.again") == ("x", "u0.again")
    assert {graph.producers[name].phase.kind for name in names if "." in name} == {"backward"}  # type: ignore[union-attr]


def test_ops_are_made_again_whatever_reads_them() -> None:
    graph = verify(recompute(parse_graph(GRAPH), asked(recompute=["weft.uniform"])))
    assert [name for name in made(graph) if name.endswith(".again")] == ["u1.again"]
    assert uses(graph, "g1") == ("gd1", "u1.again")
    assert uses(graph, "d1") == ("y0", "u1")


def test_waits_for_a_gradient_that_a_later_call_reads() -> None:
    made_first = '%b = batch "b" : float32[4]\n%x = call aten.exp.default(%b) : float32[4]'
    text = GRAPH.replace('%x = batch "x" : float32[4]', made_first)
    graph = verify(recompute(parse_graph(text), asked(recompute=["blocks.0"])))
    # m0 reads no gradient: its block waits for the one that gm reads.
    assert uses(graph, "x.held0") == ("x", "g1")
    assert uses(graph, "d0.again") == ("x.held0", "u0.again")


def test_a_pattern_that_names_nothing() -> None:
    with pytest.raises(StrategyError, match=r"recompute=\['block.*'\].*exist: .*blocks"):
        recompute(parse_graph(GRAPH), asked(recompute=["block.*"]))
    graph = parse_graph(GRAPH)
    assert recompute(graph, asked(recompute=[])) is graph
