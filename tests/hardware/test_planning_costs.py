"""The costs by which steps are planned: where they come from, and the buckets that follow from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.errors import UserError
from weft.hardware import DefaultDevice, default_device
from weft.hardware.measured_costs import MeasuredCosts, Measurements, Roofline, Sample
from weft.hardware.measured_store import store_measurements, this_machine
from weft.hardware.planning_costs import (
    TopologyCosts,
    _topologies,
    behind_links,
    bucket_bytes,
    catalogue_costs,
    costs_at_hand,
    costs_text,
)
from weft.hardware.topology_files import topologies, topology
from weft.units import Seconds

FACTS = {"device": "cpu", "ranks": 2, "processes": 2, "threads": 1}


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    monkeypatch.setenv("WEFT_PLAN_COSTS", "measured")


def kept(seconds: float) -> None:
    calls = {"op(f32[1])": Sample(Seconds(seconds))}
    store_measurements(Measurements({**this_machine(), **FACTS}, calls, act=Seconds(seconds)))


def at_hand(name: str = "", device_type: str = "cpu") -> object:
    return costs_at_hand(device_type, 2, 2, 1, name)


def test_nothing_measured_is_the_usual_device() -> None:
    assert at_hand() is None
    assert costs_text(None) == "usual devices"


def test_what_was_measured_counts_and_does_not_flicker(monkeypatch: pytest.MonkeyPatch) -> None:
    kept(1.04)
    first = at_hand()
    assert isinstance(first, MeasuredCosts)
    assert first.of_act(0) == 1.0
    kept(1.14)
    assert at_hand() == first
    kept(2.0)
    assert at_hand() != first
    monkeypatch.setenv("WEFT_PLAN_COSTS", "usual")
    assert at_hand() is None
    monkeypatch.setenv("WEFT_PLAN_COSTS", "best")
    with pytest.raises(UserError, match="must be measured or usual, got 'best'"):
        at_hand()


def test_gpus_are_known_by_their_names() -> None:
    found = at_hand("NVIDIA H100 80GB HBM3", "cuda")
    assert isinstance(found, TopologyCosts)
    assert (len(found.topology), found.kind(1).name) == (2, "h100-sxm-80gb")
    assert costs_text(found) == "h100-sxm-80gb of the catalogue"
    assert at_hand("NVIDIA GeForce RTX 4090", "cuda") is None


def test_every_name_has_a_topology() -> None:
    assert set(_topologies().values()) <= set(topologies())
    assert {catalogue_costs(name, 2) is not None for name in _topologies()} == {True}


def test_links_between_hosts_are_those_measured_at_the_start() -> None:
    links = replace(default_device("cpu"), link=1e8, latency=Seconds(1e-3))
    roofline = Roofline(1e9, 2e9, Seconds(3e-6))
    measured = MeasuredCosts(Measurements(FACTS, roofline=roofline), default_device("cpu"))
    assert behind_links(None, links) == links
    assert behind_links(measured, None) is measured
    assert behind_links(measured, links) == DefaultDevice(
        1e9, 2e9, Seconds(3e-6), 1e8, Seconds(1e-3)
    )


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_buckets_of_usual_devices(device_type: str) -> None:
    """As much as a link sends in twenty times its latency, whatever the ranks."""
    device = default_device(device_type)
    assert bucket_bytes(device, (0, 1)) == bucket_bytes(device, (0,))
    assert bucket_bytes(device, (0,)) == round(20 * device.latency * device.link)


def test_more_latency_asks_for_larger_buckets() -> None:
    costs = TopologyCosts(topology("h100x64"))
    few, many = (bucket_bytes(costs, tuple(range(ranks))) for ranks in (8, 64))
    assert 1e6 < few < many < 1e9
