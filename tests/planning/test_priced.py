"""Planned steps with costs: which calls count, and bounds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import weft
from models import classification_loss
from weft.compiler.plans.specialize import SUMMED_PRODUCT
from weft.hardware import default_device
from weft.hardware.measured_costs import MeasuredCosts, Measurements
from weft.ir.plan import Compute
from weft.layout import Placement
from weft.planning.plans import PricedStep, plan_stored, planned_step, priced_step
from weft.simulator.planned import PlannedStep

CPU = default_device("cpu")


def planned() -> PlannedStep:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    batch = {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.int64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stored = weft.Job(model, classification_loss, optimizer, batch).stored()
    strategy = replace(weft.data_parallel(), micro_batches=2)
    compiled = plan_stored(stored, strategy, Placement("cpu", (2,), (0, 1)))
    return planned_step(stored.graph, compiled)


def ops(found: PricedStep) -> list[str]:
    actors = [a for plan in found.step.plans for a in plan.actors if isinstance(a, Compute)]
    return [getattr(node, "op", "") for actor in actors for node in actor.nodes]


def test_measured_costs_are_of_calls_as_they_run() -> None:
    """The gradient of a weight and its sum over micro-batches are one; other costs are of calls as they are planned."""
    step = planned()
    usual = ops(priced_step(step, CPU))
    measured = ops(priced_step(step, MeasuredCosts(Measurements({}), CPU)))
    assert SUMMED_PRODUCT not in usual
    assert measured.count(SUMMED_PRODUCT) == 1
    assert len(measured) == len(usual) - 1


def test_a_step_takes_no_less_than_its_busiest_queue() -> None:
    found = priced_step(planned(), CPU)
    assert 0 < found.bound() <= found.ran.step_seconds
    assert found.simulation.step_seconds == found.ran.step_seconds
