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
from typing import NamedTuple, TypeAlias

from weft.actors.deadlock import Meeting, deadlock_text
from weft.actors.machine import QueueMachine
from weft.actors.messages import Act, Action, Begin, EndStep, Event, Finished, Free, Send, Start
from weft.actors.rehearse import queues_of
from weft.errors import InternalError
from weft.ir.plan import COMPUTE, HOST, Order, RankPlan

# Where a machine stands: rank and queue.
Seat: TypeAlias = tuple[int, str]


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


@dataclass
class _Stage:
    """The state of a rehearsal.

    Attributes:
        machines: of every rank and queue.
        places: for each communicating actor, its place among those of its queue, which is the same
            on all ranks.
        members: for each communicator's queue, the ranks that use it.
        gathered: for each communication that some ranks have started: which act on which rank.
        complete: those that all have started, and that begin now.
        mail: events on their way.
        running: a heap of (end, number, seat, act).
        stirred: seats whose machine has changed since it was last asked what it may start.
        timed: for each rank, its acts so far, in the order in which they ended.
    """

    plans: Sequence[RankPlan]
    seconds: Mapping[int, Sequence[float]]
    fixed: bool
    now: float = 0.0
    machines: dict[Seat, QueueMachine] = field(default_factory=dict)
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    members: dict[str, list[int]] = field(default_factory=dict)
    gathered: dict[Meeting, dict[int, Act]] = field(default_factory=dict)
    complete: dict[Meeting, dict[int, Act]] = field(default_factory=dict)
    mail: deque[tuple[Seat, Event]] = field(default_factory=deque)
    running: list[tuple[float, int, Seat, Act]] = field(default_factory=list)
    stirred: dict[Seat, None] = field(default_factory=dict)
    timed: dict[int, list[tuple[float, int, Timed]]] = field(default_factory=dict)
    order: dict[Seat, list[tuple[int, int]]] = field(default_factory=dict)
    started: int = 0

    def __post_init__(self) -> None:
        for plan in self.plans:
            self.timed[plan.rank] = []
            for queue in queues_of(plan):
                self._seat(plan, queue)
        self.mail.extend((seat, Begin(0)) for seat in self.machines)

    def _seat(self, plan: RankPlan, queue: str) -> None:
        meets = queue not in (COMPUTE, HOST)
        in_order = meets and self.fixed
        self.machines[plan.rank, queue] = QueueMachine(plan, queue, in_order, not in_order)
        if meets:
            self.members.setdefault(queue, []).append(plan.rank)
            self.order[plan.rank, queue] = []
            own = plan.on_queue[queue]
            self.places.update(((plan.rank, actor.id), n) for n, actor in enumerate(own))

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
        if not all(machine.statistics().idle for machine in self.machines.values()):
            raise InternalError(
                deadlock_text(self.plans, self.machines, self.members, self.places, self.gathered)
            )

    def _settle(self) -> None:
        """Deliver everything that is on its way, then begin the communications that all take part in."""
        while self.mail:
            seat, event = self.mail.popleft()
            self.stirred[seat] = None
            for action in self.machines[seat].handle(event):
                if not isinstance(action, Free | EndStep):
                    self._obey(seat, action)
        # By number, so that what begins at one time on a rank stands in an order that does not
        # depend on how ranks are numbered, or how many of those that are alike take part.
        if self.complete:
            for meeting in sorted(self.complete, key=lambda each: (len(each.queue), each.queue)):
                self._begin(meeting, self.complete.pop(meeting))

    def _obey(self, seat: Seat, action: Action) -> None:
        rank, queue = seat
        if isinstance(action, Send):
            self.mail.append(((rank, action.queue), action.event))
        elif isinstance(action, Act) and queue in self.members:
            self._arrive(seat, action)
        elif isinstance(action, Act):
            self._start(seat, action, self.seconds[rank][action.actor])

    def _arrive(self, seat: Seat, act: Act) -> None:
        """A rank takes part in a communication; it begins with the last of them."""
        rank, queue = seat
        meeting = Meeting(queue, self.places[rank, act.actor], act.micro)
        there = self.gathered.setdefault(meeting, {})
        there[rank] = act
        if len(there) == len(self.members[queue]):
            self.complete[meeting] = self.gathered.pop(meeting)

    def _begin(self, meeting: Meeting, there: Mapping[int, Act]) -> None:
        """A communication begins on all its ranks, and lasts as long as its slowest rank says."""
        lasts = max(self.seconds[member][one.actor] for member, one in there.items())
        for member, one in there.items():
            self.order[member, meeting.queue].append((one.actor, one.micro))
            self._start((member, meeting.queue), one, lasts)

    def _start(self, seat: Seat, act: Act, lasts: float) -> None:
        self.started += 1
        heappush(self.running, (self.now + lasts, self.started, seat, act))
        timed = Timed(act.actor, act.micro, self.now, self.now + lasts)
        self.timed[seat[0]].append((self.now, self.started, timed))

    def _end(self) -> None:
        """Everything that ends now ends."""
        while self.running and self.running[0][0] <= self.now:
            _, _, seat, act = heappop(self.running)
            self.mail.append((seat, Finished(*act)))

    def _meet(self) -> bool:
        """Start what is ready on all ranks of a communicator, one communication for each that is idle."""
        begun = False
        for queue in dict.fromkeys(queue for _, queue in self.stirred if queue in self.members):
            seats = [(rank, queue) for rank in self.members[queue]]
            for seat in seats:
                self.stirred.pop(seat, None)
            begun |= not self.fixed and self._meet_on(queue, seats)
        return begun

    def _meet_on(self, queue: str, seats: Sequence[Seat]) -> bool:
        if any(self.machines[seat].first() is None for seat in seats):
            return False
        offers = []
        for seat in seats:
            acts = self.machines[seat].ready()
            offers.append({(self.places[seat[0], act.actor], act.micro): act for act in acts})
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
        for seat in tuple(self.stirred):
            del self.stirred[seat]
            act = self.machines[seat].first()
            if act is not None:
                self.mail.append((seat, Start(act.actor)))
                begun = True
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
