"""The virtual clock of tasks: when each begins and ends, with the slow-down by concurrent tasks.

At one time, tasks end before others begin. Then each idle communicator begins the first of what it may, and once
nothing more ends at this time each idle queue of a rank does. So do the machines of `weft.actors.machine`, driven with
the same durations; a law of the tests compares them.

Communications share links, and calls and communications take longer beside each other: kernels of both share a device's
units and memory, or a host's cores. Speeds change when something begins or ends; what is left of a task is worked off
at its new speed from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, final

from weft.actors.deadlock import deadlock_text
from weft.errors import InternalError
from weft.hardware.costs import Contention
from weft.ir.plan import COMPUTE, Order, RankPlan
from weft.simulator.sharing import LinkSharing
from weft.simulator.tasks import Tasks, is_communicator, repeat_steps, step_tasks, to_ticks
from weft.units import Seconds

NOTHING_SHARED = LinkSharing(())
# The end of a task that has not begun.
NEVER = Seconds(-1.0)


@final
@dataclass(frozen=True)
class TaskTimes:
    """The begins and ends of tasks, in seconds from the begin of the first step.

    Attributes:
        starts, ends: of each task; `NEVER` of one that waits for ever.
        begun: the tasks, as they begin.
        order: the tasks, as they end.
    """

    starts: Sequence[Seconds]
    ends: Sequence[Seconds]
    begun: Sequence[int]
    order: Sequence[int]

    @property
    def makespan(self) -> Seconds:
        """The end of the last."""
        return max(self.ends, default=Seconds(0.0))


def run(
    tasks: Tasks,
    slowdown: Mapping[int, Contention] | None = None,
    sharing: LinkSharing = NOTHING_SHARED,
    uses: Sequence[int] = (),
    *,
    stuck: bool = False,
) -> TaskTimes:
    """The times of all tasks.

    Args:
        tasks: that run; their seconds are those that each takes alone.
        slowdown: of each rank; by default nothing slows down. A communication is as slow as the rank that slows it
            down most.
        sharing: the needs of communications for links.
        uses: for each task, the number of what it needs; -1 for nothing. Tasks of one number are one
            communication of several groups, which its needs count in already.
        stuck: true to return the times even if some tasks never begin.

    Raises:
        InternalError: when some tasks never begin.
    """
    clock = _Clock(tasks)
    slow = {rank: each for rank, each in (slowdown or {}).items() if max(each) > 1.0}
    if slow or sharing.any:
        clock.speeds = _Speeds(clock, slow, sharing, uses)
    clock.run()
    left = len(tasks) - len(clock.order)
    if left and not stuck:
        raise InternalError(f"{left} tasks wait for each other for ever")
    return TaskTimes(clock.starts, clock.ends, clock.begun, clock.order)


@final
class _Clock:
    """The state of a run.

    Attributes:
        starts, ends: of each task, so far.
        coming: a heap of (end, task) of those that run; where speeds change, only those count whose end is in `ends`.
        begun, order: the tasks that have begun, and those that have ended, one after the other.
        speeds: of those that run; None if all are as fast as alone.
    """

    def __init__(self, tasks: Tasks) -> None:
        size = len(tasks)
        self.tasks = tasks
        self.starts = [NEVER] * size
        self.ends = [NEVER] * size
        self.coming: list[tuple[Seconds, int]] = []
        self.begun: list[int] = []
        self.order: list[int] = []
        self.speeds: _Speeds | None = None
        self._lane, self._lasts = tasks.lane, tasks.seconds
        # For each task, those that wait for it, and how many that it waits for have not ended.
        self._follows: list[list[int]] = [[] for _ in tasks.needs]
        for task, own in enumerate(tasks.needs):
            for need in own:
                self._follows[need].append(task)
        self._lacks = list(map(len, tasks.needs))
        # For each lane, a heap of the tasks that may begin.
        self._ready: list[list[int]] = [[] for _ in tasks.lanes]
        self._idle = [True] * len(tasks.lanes)
        # Lanes of communicators, and of ranks, that have got something since they were last asked for a task.
        self._rendezvous, self._stirred = set[int](), set[int]()
        self._stirring = [
            self._rendezvous if is_communicator(x.queue) else self._stirred for x in tasks.lanes
        ]

    def run(self) -> None:
        """Run until nothing more can happen."""
        now, coming = Seconds(0.0), self.coming
        for task, lacks in enumerate(self._lacks):
            lane = self._lane[task]
            if not lacks and lane >= 0:
                heappush(self._ready[lane], task)
                self._stirring[lane].add(lane)
            elif not lacks:
                self._begin(task, now)
        while True:
            self._work(self._rendezvous, now)
            if not (coming and coming[0][0] == now):
                self._work(self._stirred, now)
                if self.speeds is not None:
                    self.speeds.adjust(now)
            if not coming:
                return
            now = coming[0][0]
            self._end(now)

    def _end(self, now: Seconds) -> None:
        coming, lacks, follows, lanes = self.coming, self._lacks, self._follows, self._lane
        ends, done, idle, ready = self.ends, self.order.append, self._idle, self._ready
        stirring, speeds = self._stirring, self.speeds
        while coming and coming[0][0] == now:
            task = heappop(coming)[1]
            if speeds is not None and speeds.changing[task] and not speeds.ended(task, now):
                continue
            ends[task] = now
            done(task)
            lane = lanes[task]
            if lane >= 0:
                idle[lane] = True
                stirring[lane].add(lane)
            for other in follows[task]:
                lacks[other] = left = lacks[other] - 1
                if left:
                    continue
                lane = lanes[other]
                if lane >= 0:
                    heappush(ready[lane], other)
                    stirring[lane].add(lane)
                else:
                    self._begin(other, now)

    def _work(self, lanes: set[int], now: Seconds) -> None:
        """Begin the first task of each idle lane."""
        for lane in sorted(lanes):
            if self._idle[lane] and self._ready[lane]:
                self._idle[lane] = False
                self._begin(heappop(self._ready[lane]), now)
        lanes.clear()

    def _begin(self, task: int, now: Seconds) -> None:
        end = Seconds(now + self._lasts[task])
        self.starts[task] = now
        self.begun.append(task)
        heappush(self.coming, (end, task))
        if self.speeds is not None and self.speeds.changing[task]:
            self.ends[task] = end
            self.speeds.begun(task, now)


@final
class _Speeds:
    """The speeds of the tasks that run: of a rank's calls beside communications, of communications beside both.

    Args:
        clock: whose tasks run.
        slowdown: of the ranks that have one.
        sharing, uses: as of `run`.

    Attributes:
        changing: for each task, true if its speed, or that of others beside it, may change.
    """

    def __init__(
        self,
        clock: _Clock,
        slowdown: Mapping[int, Contention],
        sharing: LinkSharing,
        uses: Sequence[int],
    ) -> None:
        tasks, size = clock.tasks, len(clock.tasks)
        self._lasts, self._ends, self._coming = tasks.seconds, clock.ends, clock.coming
        self._slowdown, self._sharing = slowdown, sharing
        self._finished = bytearray(size)
        # For what runs at a speed that may change: speed, seconds that are left of it alone, and since when.
        self._speed = [1.0] * size
        self._left = list(tasks.seconds)
        self._since = [Seconds(0.0)] * size
        # For each task of a compute queue, its rank where that slows down; for each communication, its ranks.
        own = [each.rank if each.queue == COMPUTE else None for each in tasks.lanes]
        works = {rank for rank in own if rank in slowdown}
        self._rank = [
            own[lane] if lane >= 0 and own[lane] in works else None for lane in tasks.lane
        ]
        apart = [lane < 0 or is_communicator(tasks.lanes[lane].queue) for lane in tasks.lane]
        self._ranks = [
            [member[0] for member in members if member[0] in works] if meeting else []
            for members, meeting in zip(tasks.members, apart, strict=True)
        ]
        # For each communication, the number of what it needs of links that may be too little, and the speed they leave.
        self._use = [one if one >= 0 and sharing.needs[one] else -1 for one in uses or [-1] * size]
        self._share = [1.0] * size
        meeting = zip(self._rank, self._ranks, self._use, tasks.seconds, strict=True)
        self.changing = [
            bool(seconds) and (rank is not None or bool(ranks) or use >= 0)
            for rank, ranks, use, seconds in meeting
        ]
        # For each rank, the call that runs, and the communications; for each number, those that run.
        self._works: dict[int, int] = {}
        self._beside = {rank: set[int]() for rank in works}
        self._running: dict[int, set[int]] = {}
        # What has begun or ended: numbers of what is needed, and calls or communications of ranks.
        self._changed, self._turned = set[int](), set[int]()

    def begun(self, task: int, now: Seconds) -> None:
        """Note that a task begins whose speed may change."""
        self._since[task] = now
        rank = self._rank[task]
        if rank is not None:
            self._works[rank] = task
            self._turned.add(rank)
            return
        for rank in self._ranks[task]:
            self._beside[rank].add(task)
            self._turned.add(rank)
        use = self._use[task]
        if use >= 0:
            self._running.setdefault(use, set()).add(task)
            self._changed.add(use)

    def ended(self, task: int, now: Seconds) -> bool:
        """Note that such a task ends; False if it does not end now, since its speed has changed, or has ended."""
        if self._ends[task] != now or self._finished[task]:
            return False
        self._finished[task] = True
        rank = self._rank[task]
        if rank is not None:
            del self._works[rank]
            self._turned.add(rank)
            return True
        for rank in self._ranks[task]:
            self._beside[rank].discard(task)
            self._turned.add(rank)
        use = self._use[task]
        if use >= 0:
            self._running[use].discard(task)
            if not self._running[use]:
                del self._running[use]
                self._changed.add(use)
        return True

    def adjust(self, now: Seconds) -> None:
        """Give new speeds to what runs beside something that has begun or ended."""
        slowed = set[int]()
        for rank in self._turned:
            beside, task = self._beside[rank], self._works.get(rank)
            slowed |= beside
            if task is not None:
                self._set(task, 1.0 / self._slowdown[rank].calls if beside else 1.0, now)
        self._turned.clear()
        if self._changed:
            around = self._sharing.around(self._changed, self._running)
            for use, speed in self._sharing.speeds(around).items():
                for task in self._running[use]:
                    self._share[task] = speed
                    slowed.add(task)
            self._changed.clear()
        for task in slowed:
            # A communication takes longer beside the calls that run now on its ranks.
            ranks = (rank for rank in self._ranks[task] if rank in self._works)
            longer = max((self._slowdown[rank].exchanges for rank in ranks), default=1.0)
            self._set(task, self._share[task] / longer, now)

    def _set(self, task: int, speed: float, now: Seconds) -> None:
        before = self._speed[task]
        if speed != before:
            left = self._left[task] - (now - self._since[task]) * before
            self._left[task] = to_ticks(max(left, 0.0))
            self._since[task], self._speed[task] = now, speed
            self._ends[task] = Seconds(now + to_ticks(self._left[task] / speed))
            heappush(self._coming, (self._ends[task], task))


# One step of all ranks: when each act runs, and in which order communicators run theirs.
#
# Without orders, communicators take what is ready on all their ranks, by priority and micro-batch: the order that comes
# out is the one to fix. With the orders fixed, a step that ends proves that no run can hang, whatever the real
# durations are: with credits and orders the plans are a marked graph, in which what may act stays so until it acts
# (Commoner, Holt, Even and Pnueli, "Marked directed graphs", 1971), and a compute queue only delays what may act.


@final
class Timed(NamedTuple):
    """One act of a simulation, in seconds from the beginning of the step."""

    actor: int
    micro: int
    start: Seconds
    end: Seconds


@final
@dataclass(frozen=True)
class SimulatedStep:
    """The results of a simulation.

    Attributes:
        makespan: seconds of the step.
        timelines: for each rank, its acts in the order in which they started.
        orders: for each rank, the order of the acts of its communicators.
    """

    makespan: Seconds
    timelines: Mapping[int, tuple[Timed, ...]]
    orders: Mapping[int, tuple[Order, ...]]


def simulate_step(
    plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[Seconds]], *, fixed: bool = False
) -> SimulatedStep:
    """Run one step of all plans on the clock. Equal arguments give equal results.

    Args:
        plans: of all ranks that share a communicator.
        seconds: for each rank, how long an act of each of its actors takes.
        fixed: true if communicators keep the orders of the plans.

    Raises:
        InternalError: when the step gets stuck; the message names the acts that wait for each
            other.
    """
    tasks = repeat_steps(step_tasks(plans, seconds, ordered=fixed), 1)
    times = run(tasks, stuck=True)
    if len(times.order) < len(tasks):
        ended = (member for task in times.order for member in tasks.members[task])
        raise InternalError(deadlock_text(plans, {(r, a, m) for r, a, _, m in ended}, fixed))
    lines: dict[int, list[Timed]] = {plan.rank: [] for plan in plans}
    acts = {(plan.rank, q): list[tuple[int, int]]() for plan in plans for q in plan.on_queue}
    for task in times.begun:
        start, end, queue = (
            times.starts[task],
            times.ends[task],
            tasks.lanes[tasks.lane[task]].queue,
        )
        for rank, actor, _, micro in tasks.members[task]:
            lines[rank].append(Timed(actor, micro, start, end))
            acts[rank, queue].append((actor, micro))
    orders = {
        p.rank: tuple(Order(q, tuple(acts[p.rank, q])) for q in p.on_queue if is_communicator(q))
        for p in plans
    }
    timelines = {rank: tuple(own) for rank, own in lines.items()}
    return SimulatedStep(times.makespan, timelines, {} if fixed else orders)
