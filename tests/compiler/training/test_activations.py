"""Hints on what modules return, by name patterns."""

from __future__ import annotations

import pytest

from contexts import asked
from weft.compiler.training.activations import lay_activations
from weft.errors import StrategyError
from weft.ir import parse_graph, verify
from weft.ir.logical import Hint
from weft.layout import Broadcast, Split

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
    layouts = [("blocks.*.proj", (Split(1),)), ("blocks.?", (Broadcast(),))]
    graph = verify(lay_activations(parse_graph(GRAPH), asked(activations=layouts)))
    assert graph.producers["b"].uses == ("a",)
    assert graph.producers["b.laid"].hint == Hint((Split(1),))  # type: ignore[union-attr]
    assert graph.producers["c"].uses == ("b.laid", "x")
    # What a module around it returns is another value.
    assert graph.producers["c.laid"].hint == Hint((Broadcast(),))  # type: ignore[union-attr]
    assert graph.producers["d"].uses == ("c.laid",)
    assert "a.laid" not in graph.values
    # The backward reads the same.
    assert graph.producers["g"].uses == ("b.laid", "a")


def test_a_scalar_beside_tensors_is_passed_over() -> None:
    text = GRAPH.replace(
        '%d = call aten.sum.default(%c) : float32[] at "m.py":2',
        '%e = call aten.mean.default(%c) : float32[] at "m.py":1 in "blocks.0"\n'
        "%f = call aten.sum.default(%c) : float32[]\n"
        "%d = call aten.add.Tensor(%e, %f) : float32[]",
    )
    graph = verify(
        lay_activations(parse_graph(text), asked(activations=[("blocks.0", (Split(0),))]))
    )
    assert graph.producers["f"].uses == ("c.laid",)
    assert graph.producers["d"].uses == ("e", "f")


def test_a_scalar_alone_is_hinted() -> None:
    """So that a split that it cannot take is refused."""
    graph = parse_graph(
        """
graph "scalar"
%x = batch "x" : float32[4]
%a = call aten.sum.default(%x) : float32[] at "m.py":1 in "criterion"
%b = call aten.exp.default(%a) : float32[]
output "loss" %b
"""
    )
    assert (
        "a.laid" in lay_activations(graph, asked(activations=[("criterion", (Split(0),))])).values
    )


def test_a_pattern_that_names_nothing() -> None:
    graph = parse_graph(GRAPH)
    assert lay_activations(graph, asked(activations=())) is graph
    with pytest.raises(StrategyError, match=r"'proj'.*matches nothing.*blocks\.0"):
        lay_activations(graph, asked(activations=[("proj", (Split(1),))]))


SUMS = """
graph "sums"
%x = batch "x" : float32[4, 8]
%a = call aten.exp.default(%x) : float32[4, 8] at "m.py":1 in "attention.out"
%b = call aten.sin.default(%x) : float32[4, 8] at "m.py":1 in "mlp.out"
%c = call aten.cos.default(%x) : float32[4, 8] at "m.py":1 in "more.out"
%ab = call aten.add.Tensor(%a, %b) : float32[4, 8] at "m.py":1
%abc = call aten.add.Tensor(%ab, %c) : float32[4, 8] at "m.py":1
%all = call aten.add.Tensor(%abc, %x) : float32[4, 8] at "m.py":1
%d = call aten.sum.default(%all) : float32[] at "m.py":2
output "loss" %d
"""


def test_what_is_only_added_up_is_hinted_as_its_sum() -> None:
    graph = verify(lay_activations(parse_graph(SUMS), asked(activations=[("*.out", (Split(1),))])))
    assert graph.producers["ab"].uses == ("a", "b")
    assert graph.producers["abc"].uses == ("ab", "c")
    assert graph.producers["all"].uses == ("abc.laid", "x")
    assert [name for name in graph.values if name.endswith(".laid")] == ["abc.laid"]


@pytest.mark.parametrize(
    "other",
    [
        SUMS.replace('"loss" %d', '"loss" %d\noutput "a" %a').replace('output "loss" %d\n', "", 1)
        + 'output "loss" %d\n',
        SUMS.replace("add.Tensor(%a, %b)", "mul.Tensor(%a, %b)"),
        SUMS.replace("add.Tensor(%a, %b)", "add.Tensor(%a, %b, alpha=2)"),
        SUMS.replace('"mlp.out"', '"mlp.other"'),
    ],
    ids=["read elsewhere", "no sum", "scaled", "one hint"],
)
def test_what_is_read_in_another_way_keeps_its_hint(other: str) -> None:
    graph = verify(lay_activations(parse_graph(other), asked(activations=[("*.out", (Split(1),))])))
    assert "a.laid" in graph.values
    assert "abc.laid" not in graph.values
