"""From a planned step and the costs of a machine to a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from weft.hardware.costs import Capacity, CostOverrides, Costs
from weft.ir.plan import COMPUTE, HOST, Communicate
from weft.simulator.acts import ActCosts, act_costs, with_overrides
from weft.simulator.clock import TaskTimes, Timed, run
from weft.simulator.facts import (
    MemoryUse,
    PathAct,
    RankTimes,
    critical_path,
    interval,
    largest_costs,
    nanoseconds,
    rank_rows,
)
from weft.simulator.planned import PlannedStep
from weft.simulator.sharing import SharedLinks
from weft.simulator.simulation import Simulation
from weft.simulator.tasks import Tasks, repeat_steps, step_tasks, to_ticks
from weft.traces.events import Lines, actor_name, lines_of
from weft.traces.rows import RankTrace, parts_of
from weft.units import NO_TIME, Bytes, Seconds

# Steps that are simulated at first and at most, until one takes as long as the one before.
FIRST, MOST = 3, 12


def simulate(step: PlannedStep, costs: Costs, given: CostOverrides | None = None) -> Simulation:
    """Simulate steps of a plan, one after the other, until their times are equal. Equal arguments give equal results.

    Args:
        step: what runs.
        costs: of the machine; its ranks are those of the plans.
        given: the user's overrides of costs, if any.

    Raises:
        UserError: when an override names something that is not in the plans.
        InternalError: when a step gets stuck.
    """
    acts = costs_of(step, costs, given)
    return simulation_of(step, acts, costs, steady_steps(step, acts, costs))


def costs_of(step: PlannedStep, costs: Costs, given: CostOverrides | None = None) -> ActCosts:
    """The costs of the acts of a step on a machine, with the user's overrides.

    Raises:
        UserError: when an override names something that is not in the plans.
    """
    acts = act_costs(step, costs)
    return acts if given is None else with_overrides(acts, given, step.plans, lines_of(step.graph))


def simulation_of(step: PlannedStep, acts: ActCosts, costs: Costs, ran: SteadySteps) -> Simulation:
    """Build the `Simulation` from the timings of a step.

    Args:
        step: what ran.
        acts: what its acts cost, instead of what `costs` would say.
        costs: of the machine.
        ran: its `steady_steps`.
    """
    capacities = {plan.rank: costs.capacity(plan.rank) for plan in step.plans}
    lines = lines_of(step.graph)
    ranks = _rank_times(step, ran)
    busiest = max(ranks, key=lambda each: (each.parts.compute, -each.rank)).rank
    plan = next(plan for plan in step.plans if plan.rank == busiest)
    return Simulation(
        step_seconds=ran.step_seconds,
        first_seconds=Seconds(ran.ends[0] + ran.host),
        steady=ran.steady,
        interval=_interval(step, acts, capacities, ran),
        devices=len(step.ranks),
        device=", ".join(dict.fromkeys(each.name for each in capacities.values())),
        flops=step.flops,
        peak_flops=_peak(step, capacities),
        samples=step.samples,
        tokens=step.tokens,
        sent_bytes=sent_bytes(step),
        memory=_fullest(step, capacities),
        ranks=ranks,
        costs=largest_costs(plan, acts, lines),
        path=tuple(_path(step, lines, ran)),
        estimates=acts.estimates,
        traces=ran.traces(step, lines),
    )


@final
@dataclass(frozen=True)
class SteadySteps:
    """Steps that were simulated, and when each of those ended that are looked at."""

    tasks: Tasks
    times: TaskTimes
    ends: Sequence[Seconds]
    host: Seconds

    @property
    def step_seconds(self) -> Seconds:
        """Seconds of a step, and of the host around it."""
        return Seconds(self.period + self.host)

    @property
    def last(self) -> int:
        return len(self.ends) - 1

    @property
    def window(self) -> tuple[Seconds, Seconds]:
        """From the end of the step before to the end of the last."""
        return self.ends[-2] if self.last else Seconds(0.0), self.ends[-1]

    @property
    def period(self) -> Seconds:
        """Seconds of a step: of the last where all take as long, else the mean over a cycle, or over the last half."""
        found = self._periods
        half = max(len(found) // 2, 1)
        for cycle in range(1, half + 1):
            if len(found) > 2 * cycle - 1 and found[-cycle:] == found[-2 * cycle : -cycle]:
                return Seconds(sum(found[-cycle:]) / cycle)
        return Seconds(sum(found[-half:]) / half)

    @property
    def steady(self) -> bool:
        """True if the last step took as long as the one before, which was not the first."""
        return len(self.ends) > 2 and self._periods[-1] == self._periods[-2]

    @property
    def _periods(self) -> list[Seconds]:
        """Seconds from end to end."""
        return [Seconds(end - before) for before, end in pairwise((0.0, *self.ends))]

    def timelines(self) -> dict[int, list[Timed]]:
        """The acts of the last step on each planned rank."""
        found: dict[int, list[Timed]] = {}
        for task, members in enumerate(self.tasks.members):
            for rank, actor, step, micro in members:
                if step == self.last:
                    act = Timed(actor, micro, self.times.starts[task], self.times.ends[task])
                    found.setdefault(rank, []).append(act)
        return found

    def traces(self, step: PlannedStep, lines: Lines) -> tuple[RankTrace, ...]:
        ranks = {one.queue: one.ranks for one in step.communicators}
        plans = [plan for plan in step.plans if plan.rank in step.members]
        return rank_rows(plans, ranks, lines, self.tasks, self.times, (self.last,))


def steady_steps(step: PlannedStep, acts: ActCosts, costs: Costs) -> SteadySteps:
    """Simulate steps until one takes as long as the one before; for callers that need only the time.

    Raises:
        InternalError: when a step gets stuck.
    """
    capacities = {plan.rank: costs.capacity(plan.rank) for plan in step.plans}
    seconds = {p.rank: list(map(to_ticks, acts.seconds(p.rank))) for p in step.plans}
    slowdown = {rank: each.slowdown for rank, each in capacities.items()}
    shared = SharedLinks(step.plans, acts)
    # The host of a device that is launched is one step ahead of it.
    ahead = 2 if all(each.launched for each in capacities.values()) else 1
    host = max((each.step for each in capacities.values()), default=NO_TIME)
    one, steps = step_tasks(step.plans, seconds, ahead), FIRST
    while True:
        # Nothing runs beside the end of the last step, or after it: it may be shorter, and is ignored.
        tasks = repeat_steps(one, steps + 1)
        times = run(tasks, slowdown, shared.sharing, shared.uses(tasks))
        ends = [Seconds(0.0)] * (steps + 1)
        for task, members in enumerate(tasks.members):
            if members:
                number = tasks.step_of(task)
                ends[number] = max(ends[number], times.ends[task])
        del ends[steps:]
        ran = SteadySteps(tasks, times, ends, host)
        if ran.steady or steps >= MOST:
            return ran
        steps = min(2 * steps, MOST)


def _rank_times(step: PlannedStep, ran: SteadySteps) -> tuple[RankTimes, ...]:
    begin, end = nanoseconds(ran.window[0]), nanoseconds(ran.window[1])
    plans = {plan.rank: plan for plan in step.plans if plan.rank in step.members}
    acts: dict[int, dict[str, list[tuple[int, int]]]] = {
        rank: {queue: [] for queue in (COMPUTE, HOST, *plan.on_queue)}
        for rank, plan in plans.items()
    }
    times = ran.times
    # What has ended before the window, whatever nanoseconds round.
    early = ran.window[0] - 1e-8
    for task, members in enumerate(ran.tasks.members):
        if times.ends[task] < early:
            continue
        first, last = nanoseconds(times.starts[task]), nanoseconds(times.ends[task])
        if last > begin and first < end:
            part = max(first, begin), min(last, end)
            for rank, actor, _, _ in members:
                if rank in plans:
                    acts[rank][plans[rank].actors[actor].queue].append(part)
    return tuple(
        _times_of(rank, own, (begin, end), len(step.members[rank])) for rank, own in acts.items()
    )


def _times_of(
    rank: int, acts: Mapping[str, Sequence[tuple[int, int]]], window: tuple[int, int], count: int
) -> RankTimes:
    busy = {name: sum(end - begin for begin, end in own) / 1e9 for name, own in acts.items()}
    others = (one for name, own in acts.items() if name not in (COMPUTE, HOST) for one in own)
    shares = parts_of(rank, [window], acts[COMPUTE], others)
    bubble = 1 - busy[COMPUTE] / shares.step if shares.step else 0.0
    times = {queue: Seconds(seconds) for queue, seconds in busy.items()}
    return RankTimes(rank, count, shares, max(bubble, 0.0), times)


def _peak(step: PlannedStep, capacities: Mapping[int, Capacity]) -> float | None:
    """FLOP/s of all devices, in the dtype of most operations."""
    found = 0.0
    for rank, members in step.members.items():
        peak = capacities[rank].peaks.get(step.dtype) if rank in capacities else None
        if peak is None:
            return None
        found += peak * len(members)
    return found


def _fullest(step: PlannedStep, capacities: Mapping[int, Capacity]) -> MemoryUse | None:
    """The rank with the least room left, or, where nobody knows what there is, the one that holds most."""
    uses = [
        MemoryUse(rank, peak, capacities[rank].reserve, capacities[rank].memory)
        for rank, peak in sorted(step.peaks.items())
        if rank in capacities
    ]
    return max(uses, key=lambda use: (use.total - (use.capacity or 0), -use.rank), default=None)


def _interval(
    step: PlannedStep,
    acts: ActCosts,
    capacities: Mapping[int, Capacity],
    ran: SteadySteps,
) -> tuple[Seconds, Seconds] | None:
    """Percentiles of one step, moved to where a step of many lies."""
    drift = max((each.drift for each in capacities.values()), default=0.0)
    each = {
        plan.rank: [acts.deviation(plan.rank, actor.id) for actor in plan.actors]
        for plan in step.plans
    }
    if not drift and not any(any(own) for own in each.values()):
        return None
    deviations = [
        max((each[rank][actor] for rank, actor, _, _ in members), default=0.0)
        for members in ran.tasks.members
    ]
    low, high = interval(ran.tasks, ran.times, deviations, drift, ran.last)
    return Seconds(low + ran.host), Seconds(high + ran.host)


def _path(step: PlannedStep, lines: Lines, ran: SteadySteps) -> list[PathAct]:
    plans = {plan.rank: plan for plan in step.plans}
    found, names = [], dict[tuple[int, int], str]()
    for task in critical_path(ran.tasks, ran.times, ran.last):
        rank, id, _, micro = ran.tasks.members[task][0]
        actor = plans[rank].actors[id]
        start, end = ran.times.starts[task], ran.times.ends[task]
        if (rank, id) not in names:
            names[rank, id] = actor_name(actor, lines)
        found.append(PathAct(rank, actor.queue, names[rank, id], micro, start, end))
    return found


def sent_bytes(step: PlannedStep) -> Bytes:
    """Bytes that cross between ranks in a step: of each communicator once, and of all that its family stands for."""
    seen, total = set[int](), 0
    for plan in step.plans:
        for own in plan.on_queue.values():
            actors = [actor for actor in own if isinstance(actor, Communicate)]
            if not actors:
                continue
            id = actors[0].collectives[0].communicator
            family = step.families.get(id, (id,))
            if not seen.isdisjoint(family):
                continue
            seen.update(family)
            each = sum(actor.acts * sum(one.bytes for one in actor.collectives) for actor in actors)
            total += each * len(family)
    return Bytes(total)
