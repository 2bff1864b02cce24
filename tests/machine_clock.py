"""The machines of the runtime on a virtual clock, with durations for work: what `weft.simulator.clock` must equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

from plan_runs import ready
from weft.actors import Act, Begin, Driver, Event, QueueMachine, Ready, Released
from weft.actors.invariants import check_rank
from weft.errors import InternalError
from weft.ir.plan import COMPUTE, HOST, Order, RankPlan
from weft.simulator.clock import SimulatedStep, Timed
from weft.units import Seconds

# Number `place` of a communicator's queue, for a micro-batch.
Meeting: TypeAlias = tuple[str, int, int]


class Lane:
    """A queue of a rank: the executor and the post of its driver."""

    def __init__(self, clock: MachineClock, plan: RankPlan, queue: str) -> None:
        self.clock, self.plan, self.queue = clock, plan, queue
        self.meets = queue not in (COMPUTE, HOST)
        self.place = {actor.id: place for place, actor in enumerate(plan.on_queue[queue])}
        self.driver = Driver(QueueMachine(plan, queue, self.meets and clock.fixed), self, self)

    def start(self, act: Act) -> bool:
        if self.meets:
            meeting = self.queue, self.place[act.actor], act.micro
            self.clock.there.setdefault(meeting, {})[self] = act
        else:
            self.clock.begin({self: act})
        return False

    def free(self, register: str, version: int) -> None:
        pass

    def send(self, queue: str, event: Ready | Released) -> None:
        self.clock.mail.append((self.clock.lanes[self.plan.rank, queue], event))

    def end_step(self, step: int) -> None:
        pass

    def ready(self) -> dict[tuple[int, int], Act]:
        """The acts that may start now, first to last, by their place in the queue and micro-batch."""
        return {(self.place[act.actor], act.micro): act for act in ready(self.driver.machine)}


class MachineClock:
    """All machines of some plans; see `machine_step`."""

    def __init__(
        self, plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[Seconds]], fixed: bool
    ) -> None:
        self.plans, self.seconds, self.fixed = plans, seconds, fixed
        self.now, self.count = Seconds(0.0), 0
        # What comes: (end, number, whose act ends); what is on its way: None for the end of the act that runs.
        self.coming: list[tuple[Seconds, int, Lane]] = []
        self.mail: deque[tuple[Lane, Event | None]] = deque()
        self.there: dict[Meeting, dict[Lane, Act]] = {}
        self.timelines: dict[int, list[Timed]] = {plan.rank: [] for plan in plans}
        self.acts: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self.lanes = {(p.rank, queue): Lane(self, p, queue) for p in plans for queue in p.on_queue}
        self.groups: dict[str, list[Lane]] = {}
        for lane in self.lanes.values():
            if lane.meets:
                self.groups.setdefault(lane.queue, []).append(lane)
                self.acts[lane.plan.rank, lane.queue] = []

    def begin(self, together: Mapping[Lane, Act]) -> None:
        """Acts that last as long as the slowest of them."""
        lasts = max(self.seconds[lane.plan.rank][act.actor] for lane, act in together.items())
        for lane, act in together.items():
            self.count += 1
            end = Seconds(self.now + lasts)
            heappush(self.coming, (end, self.count, lane))
            self.timelines[lane.plan.rank].append(Timed(act.actor, act.micro, self.now, end))
            if lane.meets:
                self.acts[lane.plan.rank, lane.queue].append((act.actor, act.micro))

    def run(self) -> None:
        self.mail.extend((lane, Begin(0)) for lane in self.lanes.values())
        while True:
            while self.mail:
                lane, event = self.mail.popleft()
                lane.driver.end() if event is None else lane.driver.receive(event)
            if self.ends() or self.meet() or self.work():
                continue
            if not self.coming:
                break
            self.now = self.coming[0][0]
        if not all(lane.driver.machine.statistics().idle for lane in self.lanes.values()):
            raise InternalError("the machines wait for each other")
        for plan in self.plans:
            check_rank({q: self.lanes[plan.rank, q].driver.machine.state() for q in plan.on_queue})

    def ends(self) -> bool:
        """All end that end now."""
        found = False
        while self.coming and self.coming[0][0] <= self.now:
            self.mail.append((heappop(self.coming)[2], None))
            found = True
        return found

    def meet(self) -> bool:
        """Begin what all ranks of a communicator may, one communication for each that is idle."""
        found = False
        for queue in sorted(self.groups, key=lambda name: (len(name), name)):
            lanes = self.groups[queue]
            if self.fixed:
                for lane in lanes:
                    lane.driver.go_on()
            else:
                offers = [lane.ready() for lane in lanes]
                both = [key for key in offers[0] if all(key in offer for offer in offers)]
                for lane, offer in zip(lanes, offers, strict=True) if both else ():
                    act = offer[both[0]]
                    lane.driver.run(lane.driver.machine.start_act(act.actor, act.micro))
            whole = [
                key for key in self.there if key[0] == queue and len(self.there[key]) == len(lanes)
            ]
            for key in whole:
                self.begin(self.there.pop(key))
                found = True
        return found

    def work(self) -> bool:
        """Start the first act of every idle queue of work."""
        begun = [lane.driver.go_on() for lane in self.lanes.values() if not lane.meets]
        return any(begun)


def machine_step(
    plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[Seconds]], *, fixed: bool = False
) -> SimulatedStep:
    """One step of all plans, as their machines run it; arguments and errors as of `simulate_step`."""
    clock = MachineClock(plans, seconds, fixed)
    clock.run()
    orders = {
        plan.rank: tuple(Order(q, tuple(a)) for (r, q), a in clock.acts.items() if r == plan.rank)
        for plan in plans
    }
    timelines = {rank: tuple(acts) for rank, acts in clock.timelines.items()}
    return SimulatedStep(clock.now, timelines, {} if fixed else orders)
