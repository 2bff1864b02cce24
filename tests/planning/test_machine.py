"""Machines by name: of the catalogue, and the one at hand as it was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import UserError
from weft.hardware import measured_store
from weft.hardware.measured_costs import Measurements
from weft.hardware.measured_store import store_measurements, this_machine
from weft.planning import machine
from weft.planning.machine import machine_of


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "cores", lambda: 3)


def test_a_topology_has_its_devices() -> None:
    found = machine_of("h100x16")
    assert (found.devices, found.device_type, found.kinds([0, 1])) == (16, "cuda", {})


@pytest.mark.parametrize("name", ["here", "herex4"])
def test_a_machine_that_was_not_measured_is_told(name: str) -> None:
    with pytest.raises(UserError, match="was not measured: run `weft measure`"):
        machine_of(name)


def test_here_has_as_many_ranks_as_are_asked_for() -> None:
    facts = {**this_machine(), "device": "cpu", "ranks": 2, "processes": 2, "threads": 1}
    store_measurements(Measurements(facts))
    assert [machine_of("here").devices, machine_of("here", 2).devices] == [3, 2]
    found = machine_of("herex5", 2)
    assert (found.devices, found.device_type) == (5, "cpu")
    assert found.costs.capacity(0).name == this_machine()["processor"]
    with pytest.raises(UserError, match="herex0 has no rank; give a number from 1"):
        machine_of("herex0")


def test_a_machine_with_gpus_alone_is_of_their_type() -> None:
    facts = {**this_machine(), "device": "cuda", "ranks": 1, "processes": 1, "threads": 1}
    store_measurements(Measurements(facts))
    assert measured_store.load_measurements(1) is None
    assert machine_of("here").device_type == "cuda"
