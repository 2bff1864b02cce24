"""Over the limit on memory: what is said of the values that a rank would hold."""

from __future__ import annotations

import pytest

from weft.compiler.context import Options
from weft.compiler.memory.limit import check_limit
from weft.compiler.memory.walk import Held, Peak
from weft.errors import StrategyError
from weft.ir import parse_graph, parse_local
from weft.ir.alias import Memory
from weft.units import Bytes

GRAPH = parse_graph(
    """
graph "step"
placement @0 = cpu [0, 1]
%x = batch "x" : float32[4, 8] @0(S(0))
%y = call aten.exp.default(%x) : float32[4, 8] @0(S(0)) at "m.py":3 in "blocks.0"
%y.box0 = box %y : float32[4, 8] @0(B)
output "y" %y.box0
"""
)
PROGRAM = parse_local(
    """
local program of rank 1
form %late of %between
form %between of %y.box0
input %x = batch "x" : float32[2, 8]
"""
)


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("late", r" by aten.exp.default at m.py:3 in blocks.0\n"),
        ("y.box0", r" by aten.exp.default at m.py:3 in blocks.0\n"),
        ("x", r" from batch x\n"),
        ("y.other", r"\n"),  # a name says nothing
    ],
)
def test_a_value_is_named_with_the_line_that_makes_what_it_is_a_form_of(
    name: str, maker: str
) -> None:
    peak = Peak(1, Memory(activations=Bytes(64)), (Held(name, 1, Bytes(64)),), 0)
    assert check_limit((peak,), GRAPH, (PROGRAM,), Options(memory_limit=64)) == (peak,)
    with pytest.raises(StrategyError, match=rf"64 B: {name}{maker}"):
        check_limit((peak,), GRAPH, (PROGRAM,), Options(memory_limit=63))
