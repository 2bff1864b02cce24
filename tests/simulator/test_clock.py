"""The clock of tasks does what the machines of the runtime do: the same acts, in the same order, at the same times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from machine_clock import machine_step
from strategies import durations, law, looped_plans, pipeline_plans, rank_plans
from weft.errors import InternalError
from weft.ir.plan import RankPlan
from weft.simulator.clock import SimulatedStep, simulate_step


def found(
    simulated: Callable[..., SimulatedStep],
    plans: Sequence[RankPlan],
    seconds: Mapping[int, Sequence[float]],
    fixed: bool,
) -> SimulatedStep | None:
    """What is simulated; None where the plans get stuck."""
    try:
        return simulated(plans, seconds, fixed=fixed)
    except InternalError:
        return None


def check(
    plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[float]], fixed: bool
) -> SimulatedStep | None:
    """Check that the clock and the machines agree."""
    expected = found(machine_step, plans, seconds, fixed)
    assert found(simulate_step, plans, seconds, fixed) == expected
    return expected


@law(60)
@given(looped_plans(), st.booleans(), st.data())
def test_acts_of_a_rank_run_when_its_machines_run_them(
    plan: RankPlan | None, fixed: bool, data: st.DataObject
) -> None:
    assume(plan is not None)
    assert check([plan], {0: data.draw(durations(plan))}, fixed) is not None


@law(60)
@given(rank_plans(), st.booleans(), st.data())
def test_a_plan_that_gets_stuck_is_an_error_here_too(
    plan: RankPlan, fixed: bool, data: st.DataObject
) -> None:
    check([plan], {0: data.draw(durations(plan))}, fixed)


@law(40)
@given(pipeline_plans(), st.data())
def test_acts_of_all_ranks_run_when_their_machines_run_them(
    plans: tuple[RankPlan, ...], data: st.DataObject
) -> None:
    free = check(plans, {plan.rank: data.draw(durations(plan)) for plan in plans}, fixed=False)
    assert free is not None
    fixed = [replace(plan, orders=free.orders[plan.rank]) for plan in plans]
    other = {plan.rank: data.draw(durations(plan)) for plan in plans}
    assert check(fixed, other, fixed=True) is not None
