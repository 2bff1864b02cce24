"""The costs of a program: those of the first rank, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weft.hardware.measured_costs import MeasuredCosts, Measurements
from weft.hardware.measured_store import store_measurements, this_machine
from weft.program.planning import variants
from weft.program.planning.variants import agreed_costs
from weft.runtime.world.world import LocalWorld
from weft.units import Seconds


def kept(act: float) -> None:
    facts = {"device": "cpu", "ranks": 2, "processes": 1, "threads": 1}
    store_measurements(Measurements({**this_machine(), **facts}, act=Seconds(act)))


def test_all_ranks_take_those_of_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    monkeypatch.setenv("WEFT_PLAN_COSTS", "measured")
    world = LocalWorld(2, "cpu")
    assert agreed_costs(world) is None
    texts: list[str] = []

    def from_rank_0(world: object, what: str, tell: Callable[[], str]) -> list[str]:
        texts.append(tell())
        return [texts[0], ""]

    monkeypatch.setattr(variants, "gathered", from_rank_0)
    kept(1.0)
    found = agreed_costs(world)
    assert isinstance(found, MeasuredCosts)
    assert found.of_act(0) == 1.0
    kept(3.0)
    assert agreed_costs(world) == found
    assert texts[1] != texts[0]
