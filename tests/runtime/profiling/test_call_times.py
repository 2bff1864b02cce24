"""Calls of programs, run by themselves: each distinct one once, operands as views where they are views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import build
from build import value
from weft.hardware.measured_costs import Sample
from weft.ir.plan import LocalCall, LocalInput, LocalProgram
from weft.runtime.kernels.generated import build_kernel
from weft.runtime.profiling import call_times as measured
from weft.runtime.profiling import call_times as operands
from weft.runtime.profiling.call_times import CallOfProgram, calls_in_order, measured_calls
from weft.units import Bytes

DEVICE = torch.device("cpu")
X, W = value("x", 6, 4), value("w", 4, 5)


def program(*nodes: LocalCall) -> LocalProgram:
    return LocalProgram(0, tuple(LocalInput(v, "batch", v.name) for v in (X, W)), nodes, ())


TURNED = build.call("aten.transpose.int", (W.ref, 0, 1), value("turned", 5, 4))
BACK = build.call("aten.transpose.int", (value("turned", 5, 4).ref, 0, 1), value("back", 4, 5))
PRODUCT = build.call("aten.mm.default", (X.ref, value("back", 4, 5).ref), value("made", 6, 5))
AGAIN = build.call("aten.mm.default", (X.ref, W.ref), value("again", 6, 5))


def samples(*nodes: LocalCall) -> dict[str, Sample]:
    found, drift = measured_calls(
        calls_in_order([program(*nodes)]), lambda call: call, DEVICE, 0.0, Bytes(1)
    )
    assert 0 <= drift <= 0.5
    return found


def test_equal_calls_are_measured_once() -> None:
    found = samples(TURNED, BACK, PRODUCT, AGAIN)
    turned = "aten.transpose.int(float32[4, 5], 0, 1)"
    assert set(found) == {
        f"aten.mm.default(float32[6, 4], aten.transpose.int({turned}, 0, 1))",
        "aten.mm.default(float32[6, 4], float32[4, 5])",
        turned,
        f"aten.transpose.int({turned}, 0, 1)",
    }
    assert all(each.seconds >= 0 and each.usual >= 0 for each in found.values())


def test_operands_that_are_views_have_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    make = operands.operands_on

    def noting(*args: object) -> list[torch.Tensor]:
        found = make(*args)  # type: ignore[arg-type]
        seen.append([each.stride() for each in found])
        return found

    monkeypatch.setattr(measured, "operands_on", noting)
    back = build.call("aten.clone.default", (value("turned", 5, 4).ref,), value("copy", 5, 4))
    samples(TURNED, back)
    assert [(1, 5)] in seen  # the clone's operand, not contiguous


def test_integers_are_valid_indices() -> None:
    weight, rows = value("w", 4, 5), value("x", 6, dtype="int64")
    looked = build.call("aten.embedding.default", (W.ref, X.ref), value("made", 6, 5))
    inputs = tuple(LocalInput(v, "batch", v.name) for v in (rows, weight))
    every = calls_in_order([LocalProgram(0, inputs, (looked,), ())])
    assert list(measured_calls(every, lambda call: call, DEVICE, 0.0)[0]) == [every[0].text]
    # All rows of the table are looked up, in no order: what is cold stays so.
    found = operands._example(every[0], "x", DEVICE)
    assert len(found.unique()) > 2
    assert not bool((found.diff() >= 0).all())
    assert 0 <= int(found.min()) <= int(found.max()) < 4


def test_each_turn_is_on_other_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sets as a step holds; a result stays until its set comes again."""
    (one,) = calls_in_order([program(AGAIN)])
    seen: list[torch.Tensor] = []
    build_it = build_kernel

    def noting(*given: Any, **named: Any) -> Any:
        kernel = build_it(*given, **named)

        def function(draw: object, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            seen.extend(inputs[:1])
            return kernel.function(draw, *inputs)

        return replace(kernel, function=function)

    monkeypatch.setattr(measured, "build_kernel", noting)
    size = 4 * (6 * 4 + 4 * 5 + 6 * 5)
    assert one.bytes == size
    measured_calls([one], lambda call: call, DEVICE, 0.0, Bytes(3 * size))
    places = [each.data_ptr() for each in seen]
    assert places[:3] == places[3:6]
    assert len(set(places)) == 3


def test_calls_run_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the program: each finds the caches as the others leave them."""
    ran: list[str] = []
    make = measured._work

    def noting(one: CallOfProgram, *given: Any) -> Any:
        work = make(one, *given)
        assert work is not None
        return lambda: (ran.append(one.node.op), work())

    monkeypatch.setattr(measured, "_work", noting)
    often = [AGAIN.changed(outputs=(value(f"made{n}", 6, 5),)) for n in range(7)]
    found, _ = measured_calls(
        calls_in_order([program(TURNED, AGAIN, *often)]), lambda call: call, DEVICE, 1.0, Bytes(1)
    )
    # As often as in the program, where that does not take too long.
    whole = ["aten.transpose.int", *["aten.mm.default"] * 8]
    assert ran[:18] == whole * 2
    assert len(found) == 2
    ran.clear()
    samples(TURNED, AGAIN, *often)
    assert ran[:4] == ["aten.transpose.int", "aten.mm.default"] * 2


def test_calls_that_have_no_room_together_are_measured_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured, "_ROOM", Bytes(1))
    found = samples(TURNED, AGAIN)
    assert len(found) == 2
    assert [len(group) for group in measured._groups(calls_in_order([program(TURNED, AGAIN)]))] == [
        1,
        1,
    ]


def test_a_call_that_cannot_run_is_left_out() -> None:
    wrong = build.call("aten.mm.default", (W.ref, W.ref), value("made", 4, 5))
    assert list(samples(wrong, AGAIN)) == ["aten.mm.default(float32[6, 4], float32[4, 5])"]


def test_sums_over_a_step_are_run_in_turn() -> None:
    summed = build.call("weft.accumulate", (X.ref, "sum"), value("sum", 6, 4))
    (found,) = samples(summed).values()
    assert found.seconds >= 0


def test_what_runs_may_be_another_op() -> None:
    ran = []

    def as_run(call: LocalCall) -> LocalCall:
        ran.append(call.op)
        return call

    measured_calls(calls_in_order([program(AGAIN)]), as_run, DEVICE, 0.0)
    assert ran == ["aten.mm.default"]
