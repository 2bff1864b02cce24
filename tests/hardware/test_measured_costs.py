"""Costs from what was measured: taken as it is, on lines between sizes, scaled from the nearest, else an estimate."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import UserError
from weft.hardware import default_device
from weft.hardware.costs import Contention
from weft.hardware.durations import call_text, exchange_text
from weft.hardware.measured_costs import (
    MeasuredCosts,
    Measurements,
    Sample,
    SizedSample,
    from_json,
    on_line,
    to_json,
)
from weft.ops import OpCall, Operand
from weft.ops.call import TensorSpec
from weft.units import Bytes, Seconds

USUAL = default_device("cpu")
POINTS = (
    SizedSample(Bytes(64), Seconds(1e-4), 0.1),
    SizedSample(Bytes(1024), Seconds(2e-4), 0.2),
    SizedSample(Bytes(4096), Seconds(8e-4), 0.05),
)


def product(rows: int, inner: int = 64, columns: int = 32) -> OpCall:
    shapes = ((rows, inner), (inner, columns), (rows, columns))
    given_, by, made = (TensorSpec(shape, "float32") for shape in shapes)
    return OpCall("aten.mm.default", (Operand(0), Operand(1)), (), (given_, by), (made,))


def costs_of(*calls: OpCall, factor: float = 3.0) -> MeasuredCosts:
    samples = {
        call_text(call): Sample(
            Seconds(factor * USUAL.of_call(0, call).seconds), 0.07, USUAL.of_call(0, call).seconds
        )
        for call in calls
    }
    exchanges = {exchange_text("all_reduce", 2): POINTS}
    return MeasuredCosts(Measurements({"ranks": 2}, samples, {"AdamW": POINTS}, exchanges), USUAL)


def test_a_measured_call_is_taken_as_it_is() -> None:
    found = costs_of(product(128)).of_call(0, product(128))
    assert found.seconds == 3.0 * USUAL.of_call(0, product(128)).seconds
    assert (found.spread, found.estimate) == (0.07, "")


def test_calls_say_how_steady_the_machine_is() -> None:
    alone = replace(costs_of().measured, machine={"ranks": 1})
    steady = MeasuredCosts(alone, USUAL).capacity(0)
    # Even where nothing varies while it is measured, it is another one when steps run; ranks wait for each other.
    assert (steady.drift, steady.slowdown) == (0.035, Contention())
    other = replace(alone, drift=0.07, slowdown=Contention(3.0, 2.0))
    found = MeasuredCosts(other, USUAL).capacity(0)
    assert (found.drift, found.slowdown) == (
        pytest.approx(hypot(0.07, 0.035)),
        Contention(3.0, 2.0),
    )
    several = replace(other, machine={"ranks": 2})
    assert MeasuredCosts(several, USUAL).capacity(0).drift == pytest.approx(hypot(0.07, 0.09))
    assert from_json(to_json(other), "file") == other


def test_another_size_goes_by_the_nearest_and_says_so() -> None:
    costs = costs_of(product(128))
    found = costs.of_call(0, product(256))
    assert found.seconds == pytest.approx(3.0 * USUAL.of_call(0, product(256)).seconds)
    assert "other sizes" in found.estimate


def test_calls_that_are_too_far_apart_say_nothing_of_one_another() -> None:
    found = costs_of(product(64)).of_call(0, product(64 * 4096))
    assert found.seconds == USUAL.of_call(0, product(64 * 4096)).seconds
    assert found.estimate == "aten.mm.default was not measured"


def test_exchanges_lie_on_lines() -> None:
    costs = costs_of()
    took = costs.of_collective("all_reduce", Bytes(544), Bytes(544), [(0, 1)])
    assert took.seconds == pytest.approx(1.5e-4)
    assert not took.estimate
    other = costs.of_collective("all_gather", Bytes(544), Bytes(544), [(0, 1)])
    assert other.estimate == "all_gather of 2 ranks was not measured"


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_more_bytes_never_take_less(one: int, other: int) -> None:
    less, more = sorted((one, other))
    assert on_line(POINTS, Bytes(less)).seconds <= on_line(POINTS, Bytes(more)).seconds


@given(st.integers(0, 2))
def test_lines_go_through_the_points(place: int) -> None:
    point = POINTS[place]
    assert on_line(POINTS, point.bytes).seconds == pytest.approx(point.seconds)


def test_the_file_reads_back() -> None:
    measured = costs_of(product(128), product(8)).measured
    assert from_json(to_json(measured), "file") == measured


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weft measured costs": 2}',
        to_json(Measurements({})).replace('"act": 0.0', '"act": -1'),
        to_json(Measurements({})).replace('"act": 0.0', '"act": NaN'),
        to_json(Measurements({})).replace('"calls": {', '"calls": {"a": [1]'),
        "[" * 10**5,
    ],
)
def test_files_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"costs.json: .*weft measure"):
        from_json(text, "costs.json")


def test_acts_of_communicators_take_what_they_take_longer() -> None:
    exchanges = {exchange_text("all_reduce", 2): POINTS, exchange_text("transfer", 2): POINTS}
    found = Measurements({}, exchanges=exchanges, act=Seconds(1.0), exchange=Seconds(3.5))
    costs = MeasuredCosts(found, USUAL)
    assert costs.of_act(0) == 1.0
    size = POINTS[0].bytes
    seconds = costs.of_collective("all_reduce", size, size, [(0, 1)]).seconds
    assert seconds == pytest.approx(POINTS[0].seconds + 2.5)
    assert costs.of_transfer((), size).seconds == seconds


def test_variables_that_are_updated_together_start_once() -> None:
    start = SizedSample(Bytes(0), Seconds(3.0))
    costs = MeasuredCosts(Measurements({}, updates={"SGD": (start, *POINTS)}), USUAL)
    alone = costs.of_update(0, "SGD", POINTS[1].bytes).seconds
    assert alone == pytest.approx(3.0 + POINTS[1].seconds)
    shared = costs.of_update(0, "SGD", POINTS[1].bytes, together=6).seconds
    assert shared == pytest.approx(0.5 + POINTS[1].seconds)
