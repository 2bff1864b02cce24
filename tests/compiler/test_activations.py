"""Hints on what modules return, by name patterns."""

from __future__ import annotations

import pytest

from weft.compiler.activations import lay_activations
from weft.errors import StrategyError
from weft.ir import parse_graph, verify
from weft.ir.logical import node_uses

GRAPH = """
graph "activations"
%x = batch "x" : float32[4, 8]
%a = call aten.exp.default(%x) : float32[4, 8] at "m.py":1 in "blocks.0.proj"
%b = call aten.sin.default(%a) : float32[4, 8] at "m.py":1 in "blocks.0.proj"
%c = call aten.add.Tensor(%b, %x) : float32[4, 8] at "m.py":1 in "blocks.0"
%d = call aten.sum.default(%c) : float32[] at "m.py":2
%g = call aten.mul.Tensor(%b, %a) : float32[4, 8] {0 backward} at "m.py":1 in "blocks.0" backward
output "loss" %d
output "b" %b
"""


def test_readers_outside_of_the_module_are_hinted() -> None:
    graph = verify(
        lay_activations(parse_graph(GRAPH), [("blocks.*.proj", "S(1)"), ("blocks.?", "B")])
    )
    assert node_uses(graph.producers["b"]) == ("a",)
    assert graph.producers["b.laid"].args[1] == "S(1)"  # type: ignore[union-attr]
    assert node_uses(graph.producers["c"]) == ("b.laid", "x")
    # What a module around it returns is another value.
    assert graph.producers["c.laid"].args[1] == "B"  # type: ignore[union-attr]
    assert node_uses(graph.producers["d"]) == ("c.laid",)
    assert "a.laid" not in graph.values
    # The backward reads the same.
    assert node_uses(graph.producers["g"]) == ("b.laid", "a")


def test_a_pattern_that_names_nothing() -> None:
    graph = parse_graph(GRAPH)
    assert lay_activations(graph, ()) is graph
    with pytest.raises(StrategyError, match=r"'proj'.*names no module.*blocks\.0"):
        lay_activations(graph, [("proj", "S(1)")])
