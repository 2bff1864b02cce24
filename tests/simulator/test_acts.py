"""Costs that a user gives in place of a machine's: the sum is what was given, and parts keep their proportions."""

from __future__ import annotations

from itertools import pairwise

import pytest

from simulator.steps import planned_gpt
from weft.hardware import default_device
from weft.hardware.costs import Cost, Costs, parse_cost_overrides
from weft.ir.plan import Compute, LocalCall, RankPlan
from weft.simulator.acts import ActCosts
from weft.simulator.simulate import costs_of
from weft.units import Seconds

CPU = default_device("cpu")
MICRO_BATCHES = 4


class Free:
    """The usual device, on which calls take no time."""

    def __getattr__(self, name: str) -> object:
        return getattr(CPU, name)

    def of_call(self, rank: int, call: object, lies: object = ()) -> Cost:
        return Cost(Seconds(0.0))


FREE: Costs = Free()


def calls_of(plan: RankPlan, acts: ActCosts, kind: str) -> list[float]:
    """Seconds of a step that each call in this kind of work takes, in order."""
    return [
        actor.acts * part.cost.seconds
        for actor, own in zip(plan.actors, acts.parts[plan.rank], strict=True)
        for part in own
        if isinstance(actor, Compute)
        and isinstance(part.part, LocalCall)
        and actor.phase.kind == kind
    ]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_parts_of_a_stage_share_what_is_given_as_they_took(stage: int, kind: str) -> None:
    step = planned_gpt(micro_batches=MICRO_BATCHES)
    content = {"stages": {str(stage): {kind: 3.0}}}
    plain, found = costs_of(step, CPU), costs_of(step, CPU, parse_cost_overrides(content, "given"))
    for number, plan in enumerate(step.plans):
        took, takes = (calls_of(plan, acts, kind) for acts in (plain, found))
        if number == stage:
            assert sum(takes) == pytest.approx(3.0 * MICRO_BATCHES)
            ratios = [after / before for before, after in zip(took, takes, strict=True) if before]
            assert all(one == pytest.approx(other) for one, other in pairwise(ratios))
        else:
            assert takes == took
        other = "backward" if kind == "forward" else "forward"
        assert calls_of(plan, found, other) == calls_of(plan, plain, other)


def test_parts_that_took_no_time_share_evenly() -> None:
    step = planned_gpt(micro_batches=MICRO_BATCHES)
    found = costs_of(step, FREE, parse_cost_overrides({"stages": {"0": {"forward": 3.0}}}, "given"))
    acts, plan = found.parts, step.plans[0]
    each = {
        part.cost.seconds
        for actor, own in zip(plan.actors, acts[plan.rank], strict=True)
        for part in own
        if isinstance(actor, Compute)
        and isinstance(part.part, LocalCall)
        and actor.phase.kind == "forward"
    }
    assert len(each) == 1
    assert sum(calls_of(plan, found, "forward")) == pytest.approx(3.0 * MICRO_BATCHES)
