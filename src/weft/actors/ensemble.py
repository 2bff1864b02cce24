"""All ranks together on one virtual clock: when each act of a step runs, and in which order communicators run theirs.

Every rank's machines are driven as the runtime drives them, with estimated durations instead of
work. A communication is a rendezvous: the n-th communicating actor of a queue on one rank is the
n-th on all of them; it starts when all may start it and lasts as long as its slowest member says.

Without orders, the queues of communicators take what is ready on all their ranks, by priority and
micro-batch: the order that comes out is the one to fix. With the orders fixed, a rehearsal that
ends proves that no run can hang, whatever the real durations are: with credits and orders the plans
are a marked graph, in which what may fire stays so until it fires (Commoner, Holt, Even and Pnueli,
"Marked directed graphs", 1971), and a compute queue only delays what may fire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from weft.actors.deadlock import Meeting, deadlock_text
from weft.actors.machine import QueueMachine
from weft.actors.messages import Act, Begin, Event, Send, Start
from weft.actors.rehearse import queues_of
from weft.actors.wiring import equal_registers
from weft.errors import InternalError
from weft.ir.plan import COMPUTE, HOST, Order, RankPlan


class Timed(NamedTuple):
    """One act of a rehearsal, in seconds from the beginning of the step."""

    actor: int
    micro: int
    start: float
    end: float


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal showed.

    Attributes:
        makespan: seconds of the step.
        timelines: for each rank, its acts in the order in which they started.
        orders: for each rank, the order of the acts of its communicators.
    """

    makespan: float
    timelines: Mapping[int, tuple[Timed, ...]]
    orders: Mapping[int, tuple[Order, ...]]


def perform(
    plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[float]], *, fixed: bool = False
) -> Rehearsal:
    """Run one step of all plans on a virtual clock. Equal arguments give equal results.

    Args:
        plans: of all ranks that share a communicator.
        seconds: for each rank, how long an act of each of its actors takes.
        fixed: whether communicators keep the orders of the plans.

    Raises:
        InternalError: when the step gets stuck; the message names the acts that wait for each
            other.
    """
    stage = _Stage(plans, seconds, fixed)
    stage.run()
    return Rehearsal(stage.now, stage.timelines(), {} if fixed else stage.orders())


@dataclass(eq=False, slots=True)
class _Seat:
    """Where a machine stands; compared by identity.

    Attributes:
        rank, queue: of the machine.
        machine: of the queue.
        seconds: how long an act of each actor of the rank takes.
        peers: the seats of the rank, by queue.
        table: for a communicator, who meets there; None for a queue of work.
    """

    rank: int
    queue: str
    machine: QueueMachine
    seconds: Sequence[float]
    peers: Mapping[str, _Seat]
    table: _Table | None = None


@dataclass(eq=False, slots=True)
class _Table:
    """The seats of a communicator, one for each of its ranks; compared by identity."""

    queue: str
    seats: list[_Seat] = field(default_factory=list)


@dataclass
class _Stage:
    """The state of a rehearsal.

    Attributes:
        seats: of every rank and queue.
        tables: of every communicator's queue.
        places: for each communicating actor, its place among those of its queue, which is the same
            on all ranks.
        gathered: for each communication that some ranks have started: which act on which rank.
        complete: those that all have started, and that begin now.
        mail: events on their way; None for the end of the act that runs.
        running: a heap of (end, number, seat, act).
        stirred: seats of work whose machine has changed since it was last asked what it may start.
        called: tables of which some seat has changed likewise.
        timed: for each rank, its acts so far, in the order in which they ended.
    """

    plans: Sequence[RankPlan]
    seconds: Mapping[int, Sequence[float]]
    fixed: bool
    now: float = 0.0
    seats: list[_Seat] = field(default_factory=list)
    tables: dict[str, _Table] = field(default_factory=dict)
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    gathered: dict[Meeting, dict[int, Act]] = field(default_factory=dict)
    complete: dict[Meeting, dict[int, Act]] = field(default_factory=dict)
    mail: deque[tuple[_Seat, Event | None]] = field(default_factory=deque)
    running: list[tuple[float, int, _Seat, Act]] = field(default_factory=list)
    stirred: dict[_Seat, None] = field(default_factory=dict)
    called: dict[_Table, None] = field(default_factory=dict)
    timed: dict[int, list[tuple[float, int, Timed]]] = field(default_factory=dict)
    order: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=dict)
    started: int = 0

    def __post_init__(self) -> None:
        for plan in self.plans:
            self.timed[plan.rank] = []
            alike, peers = equal_registers(plan), dict[str, _Seat]()
            for queue in queues_of(plan):
                peers[queue] = self._seat(plan, queue, alike, peers)
        self.mail.extend((seat, Begin(0)) for seat in self.seats)

    def _seat(
        self, plan: RankPlan, queue: str, alike: Mapping[str, str], peers: Mapping[str, _Seat]
    ) -> _Seat:
        meets = queue not in (COMPUTE, HOST)
        in_order = meets and self.fixed
        machine = QueueMachine(plan, queue, in_order, not in_order, alike)
        seat = _Seat(plan.rank, queue, machine, self.seconds[plan.rank], peers)
        self.seats.append(seat)
        if meets:
            seat.table = self.tables.setdefault(queue, _Table(queue))
            seat.table.seats.append(seat)
            self.order[plan.rank, queue] = []
            own = plan.on_queue[queue]
            self.places.update(((plan.rank, actor.id), n) for n, actor in enumerate(own))
        return seat

    def run(self) -> None:
        """Go on until nothing more can happen; what ends now comes before what starts now."""
        while True:
            self._settle()
            if self.running and self.running[0][0] <= self.now:
                self._end()
            elif not self._meet() and not self._compute():
                if not self.running:
                    break
                self.now = self.running[0][0]
        if not all(seat.machine.statistics().idle for seat in self.seats):
            machines = {(seat.rank, seat.queue): seat.machine for seat in self.seats}
            members = {q: [seat.rank for seat in table.seats] for q, table in self.tables.items()}
            raise InternalError(
                deadlock_text(self.plans, machines, members, self.places, self.gathered)
            )

    def _settle(self) -> None:
        """Deliver everything that is on its way, then begin the communications that all take part in."""
        mail, stirred, called = self.mail, self.stirred, self.called
        while mail:
            seat, event = mail.popleft()
            if seat.table is None:
                stirred[seat] = None
            else:
                called[seat.table] = None
            machine = seat.machine
            for action in machine.finish() if event is None else machine.handle(event):
                if isinstance(action, Send):
                    mail.append((seat.peers[action.queue], action.event))
                elif isinstance(action, Act):
                    self._act(seat, action)
        # By number, so that what begins at one time on a rank stands in an order that does not
        # depend on how ranks are numbered, or how many of those that are alike take part.
        if self.complete:
            for meeting in sorted(self.complete, key=lambda each: (len(each.queue), each.queue)):
                self._begin(meeting, self.complete.pop(meeting))

    def _act(self, seat: _Seat, act: Act) -> None:
        """Work starts; in a communication a rank takes part, which begins with the last of them."""
        table = seat.table
        if table is None:
            self._start(seat, act, seat.seconds[act.actor])
            return
        meeting = Meeting(seat.queue, self.places[seat.rank, act.actor], act.micro)
        there = self.gathered.setdefault(meeting, {})
        there[seat.rank] = act
        if len(there) == len(table.seats):
            self.complete[meeting] = self.gathered.pop(meeting)

    def _begin(self, meeting: Meeting, there: Mapping[int, Act]) -> None:
        """A communication begins on all its ranks, and lasts as long as its slowest rank says."""
        lasts = max(self.seconds[member][one.actor] for member, one in there.items())
        seats = {seat.rank: seat for seat in self.tables[meeting.queue].seats}
        for member, one in there.items():
            self.order[member, meeting.queue].append((one.actor, one.micro))
            self._start(seats[member], one, lasts)

    def _start(self, seat: _Seat, act: Act, lasts: float) -> None:
        self.started += 1
        end = self.now + lasts
        heappush(self.running, (end, self.started, seat, act))
        timed = Timed(act.actor, act.micro, self.now, end)
        self.timed[seat.rank].append((self.now, self.started, timed))

    def _end(self) -> None:
        """Everything that ends now ends."""
        while self.running and self.running[0][0] <= self.now:
            self.mail.append((heappop(self.running)[2], None))

    def _meet(self) -> bool:
        """Start what is ready on all ranks of a communicator, one communication for each that is idle."""
        begun = False
        if not self.fixed:
            for table in self.called:
                begun |= self._meet_at(table.seats)
        self.called.clear()
        return begun

    def _meet_at(self, seats: Sequence[_Seat]) -> bool:
        if not all(seat.machine.may_act for seat in seats):
            return False
        offers = []
        for seat in seats:
            acts = seat.machine.ready()
            offers.append({(self.places[seat.rank, act.actor], act.micro): act for act in acts})
        # The first rank's choice: its acts stand by priority and micro-batch.
        for key in offers[0]:
            if all(key in offer for offer in offers):
                for seat, offer in zip(seats, offers, strict=True):
                    self.mail.append((seat, Start(offer[key].actor)))
                return True
        return False

    def _compute(self) -> bool:
        """Start the first act of every idle queue of work."""
        begun = False
        for seat in self.stirred:
            act = seat.machine.first()
            if act is not None:
                self.mail.append((seat, Start(act.actor)))
                begun = True
        self.stirred.clear()
        return begun

    def timelines(self) -> dict[int, tuple[Timed, ...]]:
        """The acts of every rank, as they started."""
        return {
            rank: tuple(timed for _, _, timed in sorted(acts)) for rank, acts in self.timed.items()
        }

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
