"""Facts that a simulation is made of: the times and the memory of ranks, and the acts of the critical path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from weft.ir.plan import Communicate, LocalUpdate, RankPlan
from weft.simulator.acts import ActCosts, Part, part_name
from weft.simulator.clock import TaskTimes
from weft.simulator.tasks import Tasks
from weft.traces.events import ActSlices, Lines, rows_of, stars
from weft.traces.rows import RankTrace, Slice, StepSpan, TimeParts
from weft.units import Bytes, Seconds


@final
@dataclass(frozen=True)
class PathAct:
    """An act of the critical path: whose, on which queue, what, and when, in seconds from the first step's begin."""

    rank: int
    queue: str
    name: str
    micro: int
    start: Seconds
    end: Seconds


@final
@dataclass(frozen=True)
class MemoryUse:
    """The memory of the fullest rank relative to its device.

    Attributes:
        rank: which.
        planned: bytes of tensors at its planned peak.
        reserve: further bytes reserved on its device.
        capacity: bytes that the device has; None if that is not known.
    """

    rank: int
    planned: Bytes
    reserve: Bytes
    capacity: Bytes | None

    @property
    def total(self) -> Bytes:
        """The bytes in total."""
        return Bytes(self.planned + self.reserve)

    @property
    def fits(self) -> bool | None:
        """True if the device has as much; None if that is not known."""
        return None if self.capacity is None else self.total <= self.capacity


@final
@dataclass(frozen=True)
class RankTimes:
    """The times of a step on a representative rank.

    Attributes:
        rank: which.
        count: number of ranks that it represents, with itself.
        parts: computing, communicating and waiting, in seconds.
        bubble: part of the step in which its compute queue does nothing.
        busy: seconds that each of its queues works.
    """

    rank: int
    count: int
    parts: TimeParts
    bubble: float
    busy: Mapping[str, Seconds]


COUNT = 10


@final
@dataclass(frozen=True)
class LargestCost:
    """A consumer of a rank's time in a step.

    Attributes:
        what: the op, the update's rule, or the kind of communication.
        where: the user's line, and the module with a star for the number of a block.
        seconds: in a step, all blocks together.
        times: number of occurrences.
        estimated: true if its cost is a guess.
    """

    what: str
    where: str
    seconds: Seconds
    times: int
    estimated: bool = False


def largest_costs(plan: RankPlan, acts: ActCosts, lines: Lines) -> tuple[LargestCost, ...]:
    """The largest costs of a rank, in seconds of a step, the largest first."""
    found: dict[tuple[str, str], tuple[float, int, bool]] = {}
    for actor, parts in zip(plan.actors, acts.parts[plan.rank], strict=True):
        for part, cost in parts:
            key = part_name(part), _where(part, lines)
            seconds, times, guessed = found.get(key, (0.0, 0, False))
            took = cost.seconds * actor.acts
            found[key] = seconds + took, times + actor.acts, guessed or bool(cost.estimate)
    every = sorted(found.items(), key=lambda each: (-each[1][0], each[0]))
    return tuple(
        LargestCost(what, where, Seconds(seconds), times, guessed)
        for (what, where), (seconds, times, guessed) in every[:COUNT]
    )


def _where(part: Part, lines: Lines) -> str:
    if isinstance(part, LocalUpdate):
        return stars(part.key)
    if isinstance(part, Communicate):
        each = [(one.reads, one.makes) for one in part.collectives]
        names = [name for reads, makes in each for name in (*reads, *(v.name for v in makes))]
    else:
        names = [*(value.name for value in part.makes), *part.uses]
    location = next((lines[name] for name in names if name in lines), None)
    return "" if location is None else stars(str(location))


SAMPLES = 256
LOW, HIGH = 5.0, 95.0


def propagate(tasks: Tasks, order: Sequence[int], seconds: np.ndarray) -> np.ndarray:
    """The ends of all tasks, for many sets of durations at once; lanes keep the order given.

    Args:
        tasks: that run.
        order: one in which they end.
        seconds: float64 [tasks, sets].

    Returns:
        Ends in seconds, float64 [tasks, sets].
    """
    ends = np.zeros_like(seconds)
    last: dict[int, int] = {}
    for task in order:
        own, lane = ends[task], tasks.lane[task]
        for need in tasks.needs[task]:
            np.maximum(own, ends[need], out=own)
        if lane >= 0:
            if lane in last:
                np.maximum(own, ends[last[lane]], out=own)
            last[lane] = task
        own += seconds[task]
    return ends


def interval(
    tasks: Tasks,
    times: TaskTimes,
    deviations: Sequence[float],
    drift: float,
    step: int,
    seed: int = 0,
) -> tuple[Seconds, Seconds]:
    """The 5th and the 95th percentile of the seconds of a step, from the end of the one before.

    Args:
        tasks: that run.
        times: as expected.
        deviations: standard deviation of the seconds of each; they are independent.
        step: which.
        drift: relative standard deviation that all of them have in common, from step to step.
        seed: of the draws, which are the same in every run.
    """
    draws = np.random.Generator(np.random.Philox(seed))
    expected = np.subtract(times.ends, times.starts)
    each = draws.standard_normal((len(tasks), SAMPLES)) * np.asarray(deviations)[:, None]
    common = 1.0 + drift * draws.standard_normal(SAMPLES)
    seconds = np.maximum((expected[:, None] + each) * common, 0.0)
    ends = propagate(tasks, times.order, seconds)
    of = np.asarray([tasks.step_of(task) for task in range(len(tasks))])
    took = ends[of == step].max(axis=0)
    if step:
        took = took - ends[of == step - 1].max(axis=0)
    low, high = np.percentile(took, (LOW, HIGH))
    return Seconds(float(low)), Seconds(float(high))


def critical_path(tasks: Tasks, times: TaskTimes, step: int) -> list[int]:
    """The tasks that make a step end when it does, first to last.

    Among several that end in time, the first by number counts: operands before the lane.
    """
    own = [
        task for task in range(len(tasks)) if tasks.members[task] and tasks.step_of(task) == step
    ]
    if not own:
        return []
    last: dict[int, int] = {}
    on_lane: dict[int, list[int]] = {}
    place = {}
    for number, task in enumerate(times.order):
        place[task], lane = number, tasks.lane[task]
        if lane >= 0:
            on_lane[task] = [last[lane]] if lane in last else []
            last[lane] = task
    at: int | None = max(own, key=lambda each: (times.ends[each], -each))
    found: list[int] = []
    while at is not None:
        if tasks.members[at]:
            if tasks.step_of(at) != step:
                break
            found.append(at)
        before = (*tasks.needs[at], *on_lane.get(at, ()))
        in_time = [one for one in before if times.ends[one] == times.starts[at]]
        # Of those that last no time, what ended last: it may have waited for the others.
        at = max(in_time, key=place.__getitem__, default=None)
    return found[::-1]


def rank_rows(
    plans: Iterable[RankPlan],
    ranks: Mapping[str, tuple[int, ...]],
    lines: Lines,
    tasks: Tasks,
    times: TaskTimes,
    steps: Sequence[int],
) -> tuple[RankTrace, ...]:
    """The rows of each planned rank, for some steps.

    Args:
        plans: of the planned ranks.
        ranks: of each communicator, by its queue.
        lines: the user's line of each value.
        tasks: that ran.
        times: when.
        steps: those to be shown.
    """
    acts: dict[int, list[tuple[int, int, int, int]]] = {}
    for task, members in enumerate(tasks.members):
        for rank, actor, step, micro in members:
            if step in steps:
                acts.setdefault(rank, []).append((actor, step, micro, task))
    return tuple(_rows(plan, acts[plan.rank], ranks, lines, times) for plan in plans)


def _rows(
    plan: RankPlan,
    acts: Sequence[tuple[int, int, int, int]],
    ranks: Mapping[str, tuple[int, ...]],
    lines: Lines,
    times: TaskTimes,
) -> RankTrace:
    queues, making = rows_of(plan), ActSlices(plan, lines)
    peers = {q: tuple(one for one in ranks.get(q, ()) if one != plan.rank) for q in queues}
    slices, spans = list[Slice](), dict[int, tuple[int, int]]()
    for id, step, micro, task in acts:
        begin, end = nanoseconds(times.starts[task]), nanoseconds(times.ends[task])
        first, last = spans.get(step, (begin, end))
        spans[step] = min(first, begin), max(last, end)
        queue = plan.actors[id].queue
        slices.append(making.of((id, step, micro), (begin, end), step, peers[queue]))
    slices.sort(key=lambda each: (queues.index(each.queue), each.begin, each.end))
    return RankTrace(
        plan.rank,
        tuple((queue, tuple(ranks.get(queue, ()))) for queue in queues),
        tuple(StepSpan(step, *spans[step]) for step in sorted(spans)),
        tuple(slices),
    )


def nanoseconds(seconds: Seconds) -> int:
    """Seconds on the clock of a trace."""
    return round(seconds * 1e9)
