"""Tasks beside others: communications share links, and calls and communications take longer beside each other.

How much longer is data of the device: kernels of both share its units and memory, or a host's cores. Speeds change
when something begins or ends; what is left of a task is worked off at its new speed from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import final

from weft.errors import InternalError
from weft.hardware.costs import Slowdown
from weft.ir.plan import COMPUTE
from weft.simulator.timing.clock import TaskWeb, Times, run
from weft.simulator.timing.sharing import LinkSharing
from weft.simulator.timing.tasks import Tasks, in_ticks
from weft.units import Seconds

NOTHING_SHARED = LinkSharing(())
# The end of what does not run.
_NEVER = Seconds(-1.0)


def is_beside(slowdown: Mapping[int, Slowdown], sharing: LinkSharing = NOTHING_SHARED) -> bool:
    """True where seconds of tasks hang on what runs beside them; else `weft.simulator.timing.clock` has all times."""
    return sharing.any or any(max(each) > 1.0 for each in slowdown.values())


def run_beside(
    tasks: Tasks,
    slowdown: Mapping[int, Slowdown],
    sharing: LinkSharing = NOTHING_SHARED,
    uses: Sequence[int] = (),
) -> Times:
    """The times of all tasks, whose seconds are those that each takes alone.

    Args:
        tasks: that run.
        slowdown: of each rank. A communication is as slow as the rank that slows it down most.
        sharing: what communications need of links.
        uses: for each task, the number of what it needs; -1 for nothing. Tasks of one number are one
            communication of several groups, which its needs count in already.

    Raises:
        InternalError: when some tasks never begin.
    """
    if not is_beside(slowdown, sharing):
        return run(tasks)
    clock = _BesideClock(tasks, slowdown, sharing, uses)
    clock.run()
    if len(clock.order) < len(tasks):
        raise InternalError(f"{len(tasks) - len(clock.order)} tasks wait for each other for ever")
    return Times(clock.starts, clock.ends, clock.order)


@final
class _BesideClock:
    """The clock of `weft.simulator.timing.clock`, of tasks whose speeds change; a test compares where none does."""

    def __init__(
        self,
        tasks: Tasks,
        slowdown: Mapping[int, Slowdown],
        sharing: LinkSharing,
        uses: Sequence[int],
    ) -> None:
        size = len(tasks)
        self.web = TaskWeb.of(tasks)
        self.starts = [Seconds(0.0)] * size
        self.ends = [_NEVER] * size
        self.order: list[int] = []
        self._sharing = sharing
        self._use = [one if one >= 0 and sharing.needs[one] else -1 for one in uses or [-1] * size]
        self._slowdown = slowdown
        slow = {rank for rank, factors in slowdown.items() if max(factors) > 1.0}
        lanes = enumerate(tasks.lanes)
        # Of lanes and communications that slow each other down: the rank of each lane, and those of each task.
        self._rank_of = {
            n: each.rank for n, each in lanes if each.queue == COMPUTE and each.rank in slow
        }
        there = set(self._rank_of.values())
        self._ranks = [
            [member[0] for member in members if member[0] in there] if lane < 0 and seconds else []
            for members, lane, seconds in zip(tasks.members, tasks.lane, tasks.seconds, strict=True)
        ]
        self._lacks = self.web.counts[:]
        self._ready: list[list[int]] = [[] for _ in tasks.lanes]
        self._idle = [True] * len(tasks.lanes)
        # (end, task); only those whose end is that in `ends` count.
        self._coming: list[tuple[Seconds, int]] = []
        self._stirred = set[int]()
        # Of what runs at a speed that may change: speed, seconds that are left of it alone, and since when.
        self._speed = [1.0] * size
        self._left = self.web.lasts[:]
        self._since = self.starts[:]
        # Of each rank where something slows down, the call that runs, and the communications.
        self._works: dict[int, int] = {}
        self._beside = {rank: set[int]() for rank in self._rank_of.values()}
        # Of communications, the speed that links leave them.
        self._share = [1.0] * size
        self._running: dict[int, int] = {}
        self._tasks_of: dict[int, set[int]] = {}
        # What has begun or ended: uses of links, and calls or communications of ranks.
        self._changed = set[int]()
        self._turned = set[int]()

    def run(self) -> None:
        """Run until nothing more can happen."""
        for task, lacks in enumerate(self._lacks):
            if not lacks:
                self._free(task, Seconds(0.0))
        if not self._coming or self._coming[0][0] > 0.0:
            self._work(Seconds(0.0))
        self._adjust(Seconds(0.0))
        coming, ends, finished = self._coming, self.ends, bytearray(len(self.ends))
        while coming:
            now = coming[0][0]
            while coming and coming[0][0] == now:
                _, task = heappop(coming)
                if ends[task] == now and not finished[task]:
                    finished[task] = True
                    self._end(task, now)
            self._work(now)
            self._adjust(now)

    def _end(self, task: int, now: Seconds) -> None:
        self.order.append(task)
        lane = self.web.lane[task]
        if lane >= 0:
            self._idle[lane] = True
            self._stirred.add(lane)
            rank = self._rank_of.get(lane)
            if rank is not None and self._works.pop(rank, None) is not None:
                self._turned.add(rank)
        else:
            self._count(task, -1)
        lacks = self._lacks
        for other in self.web.follows[task]:
            lacks[other] -= 1
            if not lacks[other]:
                self._free(other, now)

    def _free(self, task: int, now: Seconds) -> None:
        """It waits for nothing any more: it may begin, or does."""
        lane = self.web.lane[task]
        if lane >= 0:
            heappush(self._ready[lane], self.web.keys[task])
            self._stirred.add(lane)
        else:
            self._begin(task, now)
            self._count(task, 1)

    def _work(self, now: Seconds) -> None:
        """Begin the first task of each idle lane."""
        for lane in self._stirred:
            if self._idle[lane] and self._ready[lane]:
                task = heappop(self._ready[lane]) % len(self.starts)
                self._idle[lane] = False
                self._begin(task, now)
                rank = self._rank_of.get(lane)
                if rank is not None and self.web.lasts[task]:
                    self._works[rank] = task
                    self._turned.add(rank)
        self._stirred.clear()

    def _begin(self, task: int, now: Seconds) -> None:
        self.starts[task] = self._since[task] = now
        self.ends[task] = Seconds(now + self.web.lasts[task])
        heappush(self._coming, (self.ends[task], task))

    def _count(self, task: int, more: int) -> None:
        """A communication begins, or has ended."""
        if not self.web.lasts[task]:
            return
        for rank in self._ranks[task]:
            self._turned.add(rank)
            (self._beside[rank].add if more > 0 else self._beside[rank].discard)(task)
        use = self._use[task]
        if use >= 0:
            count = self._running[use] = self._running.get(use, 0) + more
            held = self._tasks_of.setdefault(use, set())
            if more > 0:
                held.add(task)
            else:
                held.discard(task)
            if more > 0 or not count:
                self._changed.add(use)

    def _adjust(self, now: Seconds) -> None:
        """Give new speeds to what runs beside something that has begun or ended."""
        slowed = set[int]()
        for rank in self._turned:
            beside, task = self._beside[rank], self._works.get(rank)
            slowed |= beside
            if task is not None:
                self._at_speed(task, 1.0 / self._slowdown[rank].calls if beside else 1.0, now)
        self._turned.clear()
        if self._changed:
            around = self._sharing.around(self._changed, self._running)
            for use, speed in self._sharing.speeds(around).items():
                for task in self._tasks_of[use]:
                    self._share[task] = speed
                    slowed.add(task)
            self._changed.clear()
        for task in slowed:
            # A communication takes longer beside the calls that run now on its ranks.
            ranks = (rank for rank in self._ranks[task] if rank in self._works)
            longer = max((self._slowdown[rank].exchanges for rank in ranks), default=1.0)
            self._at_speed(task, self._share[task] / longer, now)

    def _at_speed(self, task: int, speed: float, now: Seconds) -> None:
        before = self._speed[task]
        if speed == before:
            return
        left = self._left[task] - (now - self._since[task]) * before
        self._left[task] = in_ticks(max(left, 0.0))
        self._since[task], self._speed[task] = now, speed
        self.ends[task] = Seconds(now + in_ticks(self._left[task] / speed))
        heappush(self._coming, (self.ends[task], task))
