"""Calls hold their `OpCall`: arguments with names are numbered once, and copies with other names share it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from build import ref
from weft.cached import cached_property
from weft.errors import InternalError
from weft.ir import LogicalGraph, parse_graph
from weft.ir.arguments import with_names
from weft.ir.nodes import Call, PerMicroBatch, Phase, Ref, Value

MADE = Value("y", (2,), "float32")
ARGS = (ref("a"), (ref("b"), 2), ref("a"))
KWARGS = (("value", PerMicroBatch((1, 2))), ("other", ref("c")))
CALL = Call.of("aten.addcmul.default", ARGS, (MADE,), kwargs=KWARGS)


def test_arguments_are_numbered_by_first_appearance() -> None:
    assert CALL.operands == ("a", "b", "c")
    assert CALL.uses == ("a", "b", "a", "c")
    assert (CALL.args, CALL.kwargs) == (ARGS, KWARGS)
    assert CALL.varyings == (PerMicroBatch((1, 2)),)
    assert [CALL.call.at(micro).kwargs[0] for micro in (0, 1)] == [("value", 1), ("value", 2)]


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
def test_renamed_calls_know_their_own_arguments(names: Mapping[str, str]) -> None:
    copy = with_names(CALL, names)
    assert copy.args[0] == Ref(names.get("a", "a"))
    assert copy == Call.of(copy.op, copy.args, copy.outputs, kwargs=copy.kwargs)
    assert (copy.call is CALL.call) == (len(copy.operands) == 3)


def test_a_call_that_reads_none_of_the_names_stays() -> None:
    assert with_names(CALL, {"z": "a"}) is CALL


def test_other_fields_leave_the_arguments_as_they_are() -> None:
    copy = CALL.changed(phase=Phase(1, "backward"), outputs=(Value("z", (3,), "float32"),))
    assert copy.phase == Phase(1, "backward")
    assert [value.name for value in copy.makes] == ["z"]
    assert [spec and spec.shape for spec in copy.call.results] == [(3,)]
    assert (copy.args, copy.kwargs) == (ARGS, KWARGS)


def test_a_value_without_a_shape_is_refused() -> None:
    with pytest.raises(InternalError, match="%z, whose shape is not known"):
        CALL.changed(args=(Ref("z"),))


def graph_of(rows: int) -> LogicalGraph:
    shape = f"float32[{rows}, 4]"
    return parse_graph(
        f'graph "step"\n%x = batch "x" : {shape}\n%y = call aten.relu.default(%x) : {shape}\n'
        'output "y" %y\n'
    )


def test_rules_see_the_shapes_of_the_graph_that_a_call_stands_in() -> None:
    (call,) = graph_of(6).of_kind(Call)
    assert [spec.shape for spec in (*call.call.operands, *call.call.results)] == [(6, 4), (6, 4)]


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
