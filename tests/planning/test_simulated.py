"""`weft.simulate`: of files, jobs, steps and programs, on machines of the catalogue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, MLP, classification_loss, token_batch, token_loss, vector_batch
from weft.compiler.local.localize import families
from weft.errors import UserError
from weft.hardware import default_device
from weft.hardware.durations import exchange_text
from weft.hardware.measured_costs import Measurements, SizedSample
from weft.hardware.measured_store import store_measurements, this_machine
from weft.hardware.topology_files import topology
from weft.layout import Placement
from weft.planning.plans import plan_stored, planned_step, priced_step
from weft.units import Bytes, Seconds

PIPELINE = replace(weft.data_parallel(), stages=2, micro_batches=2)

MIXED = """
weft_topology: 1
name: mixed
nodes:
  - count: 1
    devices: {kind: h100-sxm-80gb, count: 2}
    switches: [{name: pcie, link: pcie3-x16, joins: [device0, device1]}]
    ports: [{link: infiniband-fdr, at: [pcie]}]
  - count: 1
    devices: {kind: a100-sxm-80gb, count: 2}
    switches: [{name: pcie, link: pcie3-x16, joins: [device0, device1]}]
    ports: [{link: infiniband-fdr, at: [pcie]}]
network:
  - {name: switch, latency_microseconds: 0.2}
"""


def job(**options: Any) -> weft.Job:
    torch.manual_seed(0)
    model = GPT(**options)
    return weft.Job(model, token_loss, torch.optim.AdamW(model.parameters()), token_batch(n=8))


def test_memory_is_that_of_the_simulated_order() -> None:
    """While a BatchNorm waits for its sums, updates run whose gradients then are gone."""
    with torch.device("meta"):
        model = nn.Sequential(
            *(m for _ in range(4) for m in (nn.Linear(4096, 4096), nn.BatchNorm1d(4096)))
        )
        batch = {"x": torch.zeros(512, 4096), "y": torch.zeros(512, dtype=torch.int64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stored = weft.Job(model, classification_loss, optimizer, batch).stored()
    compiled = plan_stored(stored, weft.data_parallel(), Placement("cpu", (2,), (0, 1)))
    planned = max(peak.memory.peak for peak in compiled.peaks)
    found = priced_step(
        planned_step(stored.graph, compiled), default_device("cpu")
    ).simulation.memory
    assert found is not None
    assert found.planned < 0.95 * planned


def test_files_and_jobs_are_simulated_alike(tmp_path: Path) -> None:
    job().stored().save(tmp_path / "a.graph")
    found = weft.simulate(tmp_path / "a.graph", PIPELINE, "h100x4")
    assert isinstance(found, weft.Simulation)
    assert (found.devices, found.samples, found.tokens) == (4, 8, 64)
    assert found.device == "h100-sxm-80gb"
    assert found.step_seconds > 0
    assert found == weft.simulate(job(), PIPELINE, "h100x4")
    assert found == weft.simulate(str(tmp_path / "a.graph"), PIPELINE, topology("h100x4"))


def test_steps_and_programs_are_simulated() -> None:
    model = MLP().double()
    batch = vector_batch(8)
    step = weft.Step(model, classification_loss, torch.optim.SGD(model.parameters(), 0.1), batch)
    before = weft.simulate(step, None, "h100x2")
    with weft.local_world(2):
        both = weft.placement("cpu", [0, 1])
        program = weft.compile(step, placement=both)
        assert weft.simulate(program, None, "h100x2") == before
        program.close()


def test_a_program_brings_its_strategy_and_its_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    points = (SizedSample(Bytes(8), Seconds(0.5)), SizedSample(Bytes(10**6), Seconds(1.0)))
    facts = {**this_machine(), "device": "cpu", "ranks": 2, "processes": 1, "threads": 1}
    model = MLP().double()
    with weft.local_world(2):
        program = weft.compile(
            model,
            classification_loss,
            torch.optim.SGD(model.parameters(), 0.1),
            vector_batch(8),
            placement=weft.placement("cpu", [0, 1]),
            strategy=PIPELINE,
        )
        about = program.predicted
        assert program.predicted is about
        store_measurements(Measurements(facts, exchanges={exchange_text("transfer", 2): points}))
        found = weft.simulate(program)
        there = weft.simulate(program, topology="h100x2")
        program.close()
    assert about.estimates == (
        "this machine was not measured (weft measure): usual figures of its device type",
    )
    assert (found.devices, there.devices) == (2, 2)
    assert found.sent_bytes == there.sent_bytes == about.sent_bytes > 0
    # Both stages wait for transfers of half a second, of two micro-batches.
    assert found.step_seconds > 1.0 > about.step_seconds > 0
    assert "measured with 1 process in place of 2" in found.estimates


def test_a_grid_is_given_as_numbers() -> None:
    strategy = weft.Strategy(batch={"*": (weft.split(0), weft.broadcast)})
    found = weft.simulate(job(), strategy, "h100x16", grid=(2, 4))
    assert found.devices == 8
    with pytest.raises(UserError, match="the grid 4x8 has 32 ranks, the topology has 16 devices"):
        weft.simulate(job(), strategy, "h100x16", grid=(4, 8))


def test_the_same_exchange_costs_more_between_nodes() -> None:
    near = weft.simulate(job(), None, "h100x2").exposed
    (pair,) = (weft.simulate(job(), None, "h100x16", grid=(8,)).exposed,)
    assert near < pair


def test_given_costs_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text("stages: {'*': {forward: 1.0, backward: 2.0}}\n")
    assert weft.simulate(job(), None, "h100x2", costs=path).step_seconds == pytest.approx(
        3.0, rel=0.01
    )


def test_other_things_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"must be the path of a graph file, a weft\.Job.* got 3"):
        weft.simulate(3, None, "h100x2")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="was not measured: run `weft measure`"):
        weft.simulate(job())


def test_a_planned_step_knows_all_ranks_and_operations() -> None:
    step = job(layers=2).stored(strategy=PIPELINE)
    placement = Placement("cuda", (2, 4), tuple(range(8)))
    strategy = replace(PIPELINE, recompute=("blocks.*",))
    plain = planned_step(step.graph, plan_stored(step, PIPELINE, placement))
    again = planned_step(step.graph, plan_stored(step, strategy, placement))
    assert plain.ranks == tuple(range(8))
    assert set(plain.classes) == set(plain.ranks)
    assert set(priced_step(plain, default_device("cuda")).peaks) == {p.rank for p in plain.plans}
    # Of the model: what runs again does not count.
    assert plain.flops == again.flops > 0
    assert (plain.samples, plain.tokens) == (8, 64)


def test_communicators_of_one_boxing_share_links() -> None:
    step = job().stored()
    strategy = weft.Strategy(batch={"*": (weft.split(0), weft.broadcast)})
    compiled = plan_stored(step, strategy, Placement("cuda", (2, 2), (0, 1, 2, 3)))
    found = planned_step(step.graph, compiled).families
    assert found == families(compiled.graph, compiled.plan.communicators)
    assert any(len(family) == 2 for family in found.values())


def test_ranks_on_other_devices_are_planned_apart(tmp_path: Path) -> None:
    """Two nodes, of two H100 and of two A100: the slower ones say how long a step takes."""
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED)
    mixed = weft.simulate(job(), None, path)
    assert mixed.device == "h100-sxm-80gb, a100-sxm-80gb"
    assert [(each.rank, each.count) for each in mixed.ranks] == [(0, 2), (2, 2)]
    fast, slow = (each.parts.compute for each in mixed.ranks)
    assert fast < slow


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strategy": "dp"}, "strategy must be a weft.Strategy, .*, got 'dp'"),
        ({"topology": 7}, "topology must be a name such as .*, got 7"),
        ({"topology": None}, "topology must be a name such as .*, got None"),
        ({"grid": (2.0,)}, r"grid must be the number of ranks along each axis, .*, got \(2.0,\)"),
        ({"grid": (0,)}, r"grid must be the number of ranks .*, got \(0,\)"),
        ({"grid": 2}, "grid must be the number of ranks .*, got 2"),
    ],
)
def test_arguments_of_another_kind_are_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        weft.simulate(job(), **{"topology": "h100x2", **given})
