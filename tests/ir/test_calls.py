"""Calls keep what was found of their arguments, and copies of them share it, as long as it holds for the copy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from weft.cached import cached_property
from weft.ir import LogicalGraph, parse_graph
from weft.ir.arguments import changed, with_names
from weft.ir.nodes import Call, Phase, Ref, Value, Varying
from weft.ir.queries.op_calls import op_call

FOUND = ("uses", "operands", "numbered", "varyings")
MADE = Value("y", (2,), "float32")
CALL = Call(
    "aten.addcmul.default",
    (Ref("a"), (Ref("b"), 2), Ref("a")),
    (("value", Varying((1, 2))), ("other", Ref("c"))),
    (MADE,),
)


def walked(call: Call) -> dict[str, object]:
    return {name: getattr(call, name) for name in FOUND}


def anew(call: Call) -> Call:
    return Call(call.op, call.args, call.kwargs, call.outputs, call.location, call.phase)


@pytest.mark.parametrize(
    "names",
    [
        {"a": "x"},
        {"a": "b", "b": "a"},
        {"a": "b"},  # two operands become one, so that those behind get other numbers
        {"b": "c"},
        {"a": "x", "b": "x", "c": "x"},
    ],
)
@pytest.mark.parametrize("before", [FOUND, ()])
def test_renamed_calls_know_their_own_arguments(
    names: Mapping[str, str], before: tuple[str, ...]
) -> None:
    call = anew(CALL)
    for name in before:
        getattr(call, name)
    copy = with_names(call, names)
    assert copy.args[0] == Ref(names.get("a", "a"))
    assert walked(copy) == walked(anew(copy))
    assert walked(call) == walked(anew(CALL))


def test_a_call_that_reads_none_of_the_names_stays() -> None:
    assert with_names(CALL, {"z": "a"}) is CALL


def test_other_fields_leave_the_arguments_as_they_are() -> None:
    call = anew(CALL)
    copy = changed(call, phase=Phase(1, "backward"), outputs=(Value("z", (3,), "float32"),))
    assert copy.phase == Phase(1, "backward")
    assert [value.name for value in copy.makes] == ["z"]
    assert walked(copy) == walked(anew(copy))


def graph_of(rows: int) -> LogicalGraph:
    shape = f"float32[{rows}, 4]"
    return parse_graph(
        f'graph "step"\n%x = batch "x" : {shape}\n%y = call aten.relu.default(%x) : {shape}\n'
        'output "y" %y\n'
    )


def test_rules_see_the_shapes_of_the_graph_that_a_call_stands_in() -> None:
    small, large = graph_of(2), graph_of(6)
    (call,) = small.of_kind(Call)
    seen = op_call(small, call)
    assert op_call(small, changed(call, phase=Phase(1, "forward"))) is seen
    (other,) = large.of_kind(Call)
    found = op_call(large, changed(call, outputs=other.outputs))
    assert found == op_call(large, other) != seen
    assert [spec.shape for spec in found.operands] == [(6, 4)]


class Counted:
    """Counts how often its number is computed."""

    times = 0

    @cached_property
    def number(self) -> int:
        """Seven."""
        self.times += 1
        return 7


def test_a_cached_property_is_computed_once_for_each_object() -> None:
    one, other = Counted(), Counted()
    assert (one.number, one.number, other.number) == (7, 7, 7)
    assert (one.times, other.times) == (1, 1)
    assert Counted.number.__doc__ == "Seven."
