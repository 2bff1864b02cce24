"""Offload on a compiled graph: where copies to the host and back stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contexts import asked
from weft.compiler.hints import Hints
from weft.compiler.local.localize import localize
from weft.compiler.local.offload import offload
from weft.compiler.pipeline import compile_graph
from weft.errors import StrategyError
from weft.ir import parse_graph
from weft.ir.logical import LogicalGraph
from weft.ir.plan import LocalProgram
from weft.layout import Placement

# Two layers that keep what they make for the backward; a small value, a view of a parameter.
GRAPH = """
graph "layers"
%w = parameter "a.weight" : float32[64, 64]
%x = batch "x" : float32[64, 64]
%t = call aten.t.default(%w) : float32[64, 64] at "m.py":1 in "a"
%a = call aten.mm.default(%x, %t) : float32[64, 64] at "m.py":1 in "a"
%v = call aten.view.default(%a, [4096]) : float32[4096] at "m.py":1 in "a"
%b = call aten.exp.default(%v) : float32[4096] at "m.py":2 in "b"
%s = call aten.sum.default(%b) : float32[] at "m.py":2 in "b"
%one = call aten.ones_like.default(%s) : float32[] {0 backward}
%gs = call aten.mul.Tensor(%one, %s) : float32[] {0 backward}
%k = call aten.gt.Scalar(%b, 0) : bool[4096] {0 backward}
%gb = call aten.mul.Tensor(%b, %gs) : float32[4096] {0 backward}
%gv = call aten.mul.Tensor(%gb, %v) : float32[4096] {0 backward}
%ga = call aten.view.default(%gv, [64, 64]) : float32[64, 64] {0 backward}
%gw = call aten.mm.default(%ga, %t) : float32[64, 64] {0 backward}
update "SGD" group 0 %w from %gw
output "loss" %s
"""
ONE = Placement("cpu", (1,), (0,))


def graph() -> LogicalGraph:
    return compile_graph(parse_graph(GRAPH), Hints(), ONE, [0]).graph


def offloaded(*patterns: str) -> LocalProgram:
    boxed = graph()
    context = replace(asked(offload=patterns), graph=boxed)
    return offload(localize(boxed, 0, ()), context)


def texts(program: LocalProgram) -> list[str]:
    lines = str(program).splitlines()
    return [line.split(" :")[0].strip() for line in lines if "call" in line]


def test_copies_stand_after_the_maker_and_before_the_first_reader() -> None:
    lines = texts(offloaded("a", "b"))
    assert lines == [
        "%t = call aten.t.default(%w)",
        "%a = call aten.mm.default(%x, %t)",
        "%v = call aten.reshape.default(%a, [4096])",
        "%v.host = call weft.offload(%v)",
        "%b = call aten.exp.default(%v)",
        "%b.host = call weft.offload(%b)",
        "%s = call aten.sum.default(%b)",
        "%one = call aten.ones_like.default(%s)",
        "%gs = call aten.mul.Tensor(%one, %s)",
        # %k reads no gradient: the copy waits for the one that %gb reads.
        "%b.back = call weft.load(%b.host, !device:cpu, %gs)",
        "%k = call aten.gt.Scalar(%b.back, 0)",
        "%gb = call aten.mul.Tensor(%b.back, %gs)",
        "%v.back = call weft.load(%v.host, !device:cpu, %gb)",
        "%gv = call aten.mul.Tensor(%gb, %v.back)",
        "%ga = call aten.reshape.default(%gv, [64, 64])",
        # A view of a parameter takes no memory of its own.
        "%gw = call aten.mm.default(%ga, %t)",
    ]


def test_only_the_modules_that_are_named() -> None:
    lines = texts(offloaded("b"))
    assert [line for line in lines if "offload" in line] == ["%b.host = call weft.offload(%b)"]


def test_a_pattern_that_names_nothing() -> None:
    with pytest.raises(StrategyError, match=r"offload=\['c'\].*matches nothing.* a, b"):
        offloaded("c")
