"""All ranks together on one virtual clock: when each act of a step runs, and in which order communicators run theirs.

Every rank's machines are driven as the runtime drives them (`driver.py`), with estimated durations
instead of work. A communication is a rendezvous: the n-th communicating actor of a queue on one
rank is the n-th on all of them; it starts when all may start it and lasts as long as its slowest
member says.

Without orders, the queues of communicators take what is ready on all their ranks, by priority and
micro-batch: the order that comes out is the one to fix. With the orders fixed, a simulation that
ends proves that no run can hang, whatever the real durations are: with credits and orders the plans
are a marked graph, in which what may act stays so until it acts (Commoner, Holt, Even and Pnueli,
"Marked directed graphs", 1971), and a compute queue only delays what may act.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar, final

from weft.actors.deadlock import Meeting, deadlock_text
from weft.actors.invariants import check_rank, is_debugging
from weft.actors.machine import QueueMachine
from weft.actors.messages import Act, Begin, Event, Ready, Released
from weft.actors.rank_driver import Driver, queues_of
from weft.actors.wiring import equal_registers
from weft.errors import InternalError
from weft.ir.plan import COMPUTE, HOST, Order, RankPlan
from weft.units import Seconds

Item = TypeVar("Item")


@final
class VirtualClock(Generic[Item]):
    """Virtual seconds, and what is to happen at which of them.

    Attributes:
        now: seconds since the beginning.
    """

    __slots__ = ("_coming", "_count", "now")

    def __init__(self) -> None:
        self.now = Seconds(0.0)
        # A heap of (time, number, what); of equal times, what was told first comes first.
        self._coming: list[tuple[Seconds, int, Item]] = []
        self._count = 0

    def __call__(self) -> Seconds:
        """The time now, on the virtual clock."""
        return self.now

    def after(self, seconds: Seconds, item: Item) -> Seconds:
        """Note that something happens in so many seconds; returns when that is."""
        self._count += 1
        time = Seconds(self.now + seconds)
        heappush(self._coming, (time, self._count, item))
        return time

    def due(self) -> list[Item]:
        """The items that are due now, in order; each is given once."""
        found = []
        while self._coming and self._coming[0][0] <= self.now:
            found.append(heappop(self._coming)[2])
        return found

    def advance(self) -> bool:
        """Run on to the next time at which something happens; False if nothing will."""
        if not self._coming:
            return False
        self.now = self._coming[0][0]
        return True


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


def simulate(
    plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[Seconds]], *, fixed: bool = False
) -> SimulatedStep:
    """Run one step of all plans on a virtual clock. Equal arguments give equal results.

    Args:
        plans: of all ranks that share a communicator.
        seconds: for each rank, how long an act of each of its actors takes.
        fixed: true where communicators keep the orders of the plans.

    Raises:
        InternalError: when the step gets stuck; the message names the acts that wait for each
            other.
    """
    world = _World(plans, seconds, fixed)
    world.run()
    timelines = {rank: tuple(acts) for rank, acts in world.timelines.items()}
    return SimulatedStep(world.clock(), timelines, {} if fixed else world.orders())


@final
@dataclass(eq=False, slots=True)
class _Lane:
    """A queue of a rank, with what its driver asks of it: its executor and its post. Compared by identity.

    Attributes:
        world: of which it is a part.
        rank, queue: whose it is.
        seconds: how long an act of each actor of the rank takes.
        peers: the lanes of the rank, by queue.
        rendezvous: where a communicator's act waits for the other ranks; None for a queue of work.
        driver: drives the queue's machine.
    """

    world: _World
    rank: int
    queue: str
    seconds: Sequence[Seconds]
    peers: Mapping[str, _Lane]
    rendezvous: _Rendezvous | None
    driver: Driver = field(init=False)

    def start(self, act: Act) -> bool:
        """Work takes its seconds; in a communication a rank takes part, which begins with the last of them."""
        if self.rendezvous is None:
            self.begin(act, self.seconds[act.actor])
        else:
            self.world.join(self.rendezvous, self.rank, act)
        return False

    def begin(self, act: Act, lasts: Seconds) -> None:
        """An act begins, which lasts so many seconds."""
        clock = self.world.clock
        start = clock.now
        end = clock.after(lasts, self)
        self.world.timelines[self.rank].append(Timed(act.actor, act.micro, start, end))

    def free(self, register: str, version: int) -> None:
        """There are no tensors."""

    def send(self, queue: str, event: Ready | Released) -> None:
        """Events arrive at the time at which they are sent."""
        self.world.mail.append((self.peers[queue], event))

    def end_step(self, step: int) -> None:
        """The only step ends when nothing more happens."""


@final
@dataclass(frozen=True, eq=False, slots=True)
class _Rendezvous:
    """The lanes of a communicator, one for each of its ranks; compared by identity."""

    queue: str
    lanes: list[_Lane] = field(default_factory=list)


@final
@dataclass(frozen=True)
class _World:
    """The state of a simulation.

    Attributes:
        lanes: of every rank and queue.
        rendezvous: of every communicator's queue.
        places: for each communicating actor, its place among those of its queue, which is the same
            on all ranks.
        gathered: for each communication that some ranks have started: which act on which rank.
        complete: those that all have started, and that begin now.
        mail: events on their way; None for the end of the act that runs.
        stirred: lanes of work that have got something since they were last asked for an act.
        called: rendezvous of which some lane has, where no order is fixed.
        timelines: for each rank, its acts so far.
        order: for each rank and communicator's queue, its acts so far.
    """

    plans: Sequence[RankPlan]
    seconds: Mapping[int, Sequence[Seconds]]
    fixed: bool
    clock: VirtualClock[_Lane] = field(default_factory=VirtualClock)
    lanes: list[_Lane] = field(default_factory=list)
    rendezvous: dict[str, _Rendezvous] = field(default_factory=dict)
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    gathered: dict[Meeting, dict[int, Act]] = field(default_factory=dict)
    complete: dict[Meeting, dict[int, Act]] = field(default_factory=dict)
    mail: deque[tuple[_Lane, Event | None]] = field(default_factory=deque)
    stirred: dict[_Lane, None] = field(default_factory=dict)
    called: dict[_Rendezvous, None] = field(default_factory=dict)
    timelines: dict[int, list[Timed]] = field(default_factory=dict)
    order: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for plan in self.plans:
            self.timelines[plan.rank] = []
            alike, peers = equal_registers(plan), dict[str, _Lane]()
            for queue in queues_of(plan):
                peers[queue] = self._lane(plan, queue, alike, peers)
        self.mail.extend((lane, Begin(0)) for lane in self.lanes)

    def _lane(
        self, plan: RankPlan, queue: str, alike: Mapping[str, str], peers: Mapping[str, _Lane]
    ) -> _Lane:
        meets = queue not in (COMPUTE, HOST)
        lane = _Lane(self, plan.rank, queue, self.seconds[plan.rank], peers, None)
        lane.driver = Driver(QueueMachine(plan, queue, meets and self.fixed, alike), lane, lane)
        self.lanes.append(lane)
        if meets:
            lane.rendezvous = self.rendezvous.setdefault(queue, _Rendezvous(queue))
            lane.rendezvous.lanes.append(lane)
            self.order[plan.rank, queue] = []
            own = plan.on_queue[queue]
            self.places.update(((plan.rank, actor.id), n) for n, actor in enumerate(own))
        return lane

    def run(self) -> None:
        """Go on until nothing more can happen; what ends now comes before what starts now."""
        while True:
            self._settle()
            ended = self.clock.due()
            self.mail.extend((lane, None) for lane in ended)
            if not (ended or self._meet() or self._work() or self.clock.advance()):
                break
        if not all(lane.driver.machine.statistics().idle for lane in self.lanes):
            machines = {(lane.rank, lane.queue): lane.driver.machine for lane in self.lanes}
            members = {q: [lane.rank for lane in each.lanes] for q, each in self.rendezvous.items()}
            raise InternalError(
                deadlock_text(self.plans, machines, members, self.places, self.gathered)
            )
        if is_debugging():
            for plan in self.plans:
                own = (lane for lane in self.lanes if lane.rank == plan.rank)
                check_rank({lane.queue: lane.driver.machine.state() for lane in own})

    def _settle(self) -> None:
        """Deliver everything that is on its way, then begin the communications that all take part in."""
        mail, stirred, called = self.mail, self.stirred, self.called
        while mail:
            lane, event = mail.popleft()
            if event is None:
                lane.driver.end()
            else:
                lane.driver.receive(event)
            if lane.rendezvous is None:
                stirred[lane] = None
            elif self.fixed:
                lane.driver.go_on()
            else:
                called[lane.rendezvous] = None
        # By number, so that what begins at one time on a rank stands in an order that does not
        # depend on how ranks are numbered, or how many of those that are alike take part.
        if self.complete:
            for meeting in sorted(self.complete, key=lambda each: (len(each.queue), each.queue)):
                self._begin(meeting, self.complete.pop(meeting))

    def join(self, rendezvous: _Rendezvous, rank: int, act: Act) -> None:
        """A rank is ready for a communication."""
        meeting = Meeting(rendezvous.queue, self.places[rank, act.actor], act.micro)
        there = self.gathered.setdefault(meeting, {})
        there[rank] = act
        if len(there) == len(rendezvous.lanes):
            self.complete[meeting] = self.gathered.pop(meeting)

    def _begin(self, meeting: Meeting, there: Mapping[int, Act]) -> None:
        """A communication begins on all its ranks, and lasts as long as its slowest rank says."""
        lasts = max(self.seconds[member][one.actor] for member, one in there.items())
        lanes = {lane.rank: lane for lane in self.rendezvous[meeting.queue].lanes}
        for member, one in there.items():
            self.order[member, meeting.queue].append((one.actor, one.micro))
            lanes[member].begin(one, lasts)

    def _meet(self) -> bool:
        """Start what is ready on all ranks of a communicator, one communication for each that is idle."""
        begun = False
        for rendezvous in self.called:
            begun |= self._meet_at(rendezvous.lanes)
        self.called.clear()
        return begun

    def _meet_at(self, lanes: Sequence[_Lane]) -> bool:
        if not all(lane.driver.machine.may_act for lane in lanes):
            return False
        offers = []
        for lane in lanes:
            acts = lane.driver.machine.ready()
            offers.append({(self.places[lane.rank, act.actor], act.micro): act for act in acts})
        # The first rank's choice: its acts stand by priority and micro-batch.
        for key in offers[0]:
            if all(key in offer for offer in offers):
                for lane, offer in zip(lanes, offers, strict=True):
                    act = offer[key]
                    lane.driver.run(lane.driver.machine.start_act(act.actor, act.micro))
                return True
        return False

    def _work(self) -> bool:
        """Start the first act of every idle queue of work."""
        begun = False
        for lane in self.stirred:
            begun |= lane.driver.go_on()
        self.stirred.clear()
        return begun

    def orders(self) -> dict[int, tuple[Order, ...]]:
        """The orders of every rank's communicators, where something is to be ordered."""
        return {
            plan.rank: tuple(
                Order(queue, tuple(acts))
                for (rank, queue), acts in self.order.items()
                if rank == plan.rank
            )
            for plan in self.plans
        }
