"""Settled figures: what is measured again within noise gives the same plans."""

from __future__ import annotations

import random
from collections.abc import Callable

from weft.hardware.costs import Contention
from weft.hardware.measured_costs import (
    Measurements,
    Roofline,
    Sample,
    SizedSample,
    planned_figures,
)
from weft.units import Bytes, Seconds

MACHINE = {"processor": "some", "ranks": 2}


def measured(figure: Callable[[str], float]) -> Measurements:
    """Measurements whose every figure comes from `figure`, by its name."""
    calls = {f"op{n}(f32[{n}])": Sample(Seconds(figure(f"call{n}")), 0.1) for n in range(20)}
    sizes = tuple(
        SizedSample(Bytes(size), Seconds(figure(f"size{size}")), 0.1) for size in (8, 64, 512)
    )
    rates = Roofline(figure("flops"), figure("traffic"), Seconds(figure("start")))
    return Measurements(
        MACHINE,
        calls,
        {"SGD": sizes},
        {"all_reduce of 2": sizes},
        act=Seconds(figure("act")),
        exchange=Seconds(figure("exchange")),
        step=Seconds(figure("step")),
        slowdown=Contention(figure("calls"), figure("exchanges")),
        memory=Bytes(5),
        roofline=rates,
    )


def test_noise_changes_nothing_wherever_a_figure_lies() -> None:
    """Figures of any size, measured again and again at most 10 % off."""
    chance = random.Random(0)
    for _ in range(20):
        true = dict[str, float]()

        def noisy(name: str, true: dict[str, float] = true) -> float:
            found = true.setdefault(name, 10 ** chance.uniform(-6, 2))
            return found * chance.uniform(0.9, 1.1)

        first = planned_figures(None, measured(noisy))
        kept = first
        for _ in range(5):
            kept = planned_figures(kept, measured(noisy))
            assert kept == first


def test_a_change_counts() -> None:
    before = planned_figures(None, measured(lambda _: 1.0))
    after = planned_figures(
        before, measured(lambda name: 1.5 if name in ("call3", "size8") else 1.1)
    )
    assert after.calls["op3(f32[3])"].seconds == 1.5
    assert after.calls["op4(f32[4])"].seconds == 1.0
    assert [each.seconds for each in after.updates["SGD"]] == [1.5, 1.0, 1.0]


def test_figures_are_rounded_and_have_no_spread() -> None:
    found = planned_figures(None, measured(lambda _: 0.0012345))
    assert found.calls["op1(f32[1])"] == Sample(Seconds(0.0012))
    assert found.act == 0.0012
    assert found.roofline == Roofline(0.0012, 0.0012, Seconds(0.0012))


def test_new_calls_and_sizes_are_taken() -> None:
    few = Measurements(MACHINE, {"op(f32[1])": Sample(Seconds(1.0))})
    assert planned_figures(planned_figures(None, few), measured(lambda _: 2.0)) == planned_figures(
        None, measured(lambda _: 2.0)
    )
