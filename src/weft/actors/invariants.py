"""Invariants of a queue's state, which hold after every event: rules for debugging.

With `WEFT_DEBUG=1` every machine checks itself (`QueueMachine.check_invariants`) now and
then, with `WEFT_DEBUG=every` after each event. Each rule recomputes a part of the state from acts and versions, and
reports a difference.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from weft.actors.messages import Act
from weft.actors.wiring import Port, QueueActor
from weft.errors import InternalError

VARIABLE = "WEFT_DEBUG"
# A check of so many actors and registers costs about as much as an event.
_CHEAP = 4


@final
@dataclass(frozen=True, slots=True)
class QueueState:
    """The state of a `QueueMachine`, with its words for it; not a copy.

    Attributes:
        queue: its name.
        actors, ports: as wired (`wiring.py` says what holds of each).
        turns: in order, whose turn each act of a step is; empty otherwise.
        in_order: true if the queue keeps that order.
        begun: steps begun.
        started: acts started.
        running: the act that runs.
        ready: (step, priority, micro-batch, id) of those that may act.
        left: for each step begun and not ended, how many actors have yet to finish it.
    """

    queue: str
    actors: Sequence[QueueActor]
    ports: Mapping[str, Port]
    turns: Sequence[QueueActor]
    in_order: bool
    begun: int
    started: int
    running: Act | None
    ready: Sequence[tuple[int, int, int, int]]
    left: Mapping[int, int]

    def finished(self, actor: QueueActor) -> int:
        """The number of acts of an actor that have ended."""
        return actor.acted - (self.running is not None and self.running.actor == actor.id)


# The broken invariants of a state, as text.
Rule = Callable[[QueueState], Iterator[str]]


def is_debugging() -> bool:
    """True if the environment asks for checks."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def events_between_checks(state: QueueState) -> int:
    """After how many events a queue is checked; 0 for never."""
    if not is_debugging():
        return 0
    size = len(state.actors) + len(state.ports)
    return 1 if os.environ[VARIABLE] == "every" else 1 + size // _CHEAP


def check(state: QueueState) -> None:
    """Check all rules.

    Raises:
        InternalError: naming the queue, the rules that are broken and by what.
    """
    broken = [f"{rule.__name__}: {text}" for rule in RULES for text in rule(state)]
    if broken:
        raise InternalError("\n  ".join((f"queue {state.queue} breaks its invariants:", *broken)))


def acts_follow_each_other(state: QueueState) -> Iterator[str]:
    """An actor acts once for each micro-batch of each step, in order, and never for a step that has not begun."""
    for actor in state.actors:
        if not 0 <= actor.acted <= state.begun * actor.acts:
            yield f"actor {actor.id} has acted {actor.acted} times in {state.begun} steps"
        if state.running is not None and state.running.actor == actor.id:
            last = Act(actor.id, *divmod(actor.acted - 1, actor.acts))
            if state.running != last:
                yield f"{state.running} runs, the last that was started is {last}"
    if sum(actor.acted for actor in state.actors) != state.started:
        yield f"{state.started} acts were started, which are not those of the actors"


def the_order_is_kept(state: QueueState) -> Iterator[str]:
    """The acts so far follow the order of the plan, step after step."""
    if not state.turns:
        return
    steps, place = divmod(state.started, len(state.turns))
    whole = Counter(actor.id for actor in state.turns)
    more = Counter(actor.id for actor in state.turns[:place])
    for actor in state.actors:
        if actor.acted != steps * whole[actor.id] + more[actor.id]:
            yield f"actor {actor.id} has acted {actor.acted} times, out of turn"


def conditions_are_counted(state: QueueState) -> Iterator[str]:
    """An actor waits for as many conditions as its next act lacks."""
    for actor in state.actors:
        step, micro = divmod(actor.acted, actor.acts)
        lacks = sum(port.arrived <= actor.acted for port in actor.consumes)
        lacks += sum(port.taken >= port.credits for port in actor.produces)
        if not micro:
            lacks += step >= state.begun
            lacks += sum(port.arrived <= step for port in actor.holds)
            lacks += sum(port.taken >= port.credits for port in actor.fills)
        if actor.waits != lacks:
            yield f"actor {actor.id} waits for {actor.waits} conditions, but lacks {lacks}"


def who_may_act_is_ready(state: QueueState) -> Iterator[str]:
    """Out of order, the heap holds each actor that waits for nothing, once; in order, it is not used."""
    may: list[tuple[int, int, int, int]] = []
    for actor in state.actors:
        if not actor.waits and not state.in_order:
            step, micro = divmod(actor.acted, actor.acts)
            may.append((step, actor.priority, micro, actor.id))
    if sorted(state.ready) != sorted(may):
        yield f"ready are {sorted(state.ready)}, may act {sorted(may)}"
    if any(state.ready[(n - 1) // 2] > state.ready[n] for n in range(1, len(state.ready))):
        yield f"no heap: {state.ready}"


def copies_are_within_credits(state: QueueState) -> Iterator[str]:
    """Taken are the copies of the versions that are being made or read, at most as many as there are credits."""
    for port in state.ports.values():
        making = 0
        if port.producer is not None:
            making = -(-port.producer.acted // port.span) + port.full - port.arrived
            held = {*port.local, *(version for version, n in port.remote.items() if n)}
            if port.taken != len(held) + making:
                yield f"{port.register} has {port.taken} copies, of {making} + {sorted(held)}"
        elif port.taken or port.remote:
            yield f"{port.register} is made on {port.source}, but its copies are counted here"
        if not 0 <= port.taken <= port.credits or making < 0:
            yield f"{port.register} has {port.taken} copies of {port.credits}"


def versions_are_read_by_all(state: QueueState) -> Iterator[str]:
    """A version is kept until every reader is done with it, no longer, and read only when it is there."""
    for port in state.ports.values():
        ends = [state.finished(actor) for actor in port.readers]
        ends += [state.finished(actor) // actor.acts for actor in port.holders]
        unread: dict[int, int] = {}
        for version in range(min(ends, default=port.arrived), port.arrived):
            unread[version] = sum(end <= version for end in ends)
        if port.local != unread:
            yield f"{port.register} has readers left {port.local}, expected {unread}"
        begun = [actor.acted for actor in port.readers]
        begun += [-(-actor.acted // actor.acts) for actor in port.holders]
        if max(begun, default=0) > port.arrived:
            yield f"{port.register} is read before version {max(begun) - 1} is there"


def other_queues_answer_once(state: QueueState) -> Iterator[str]:
    """A version that went to other queues is awaited from each of them at most once."""
    for port in state.ports.values():
        for version, count in port.remote.items():
            if not 0 <= count <= len(port.queues) or not 0 <= version < port.arrived:
                yield f"{port.register} awaits {count} answers for version {version}"
            elif not count and version not in port.local:
                yield f"{port.register} keeps version {version}, which nobody reads"


def steps_end_when_all_have_acted(state: QueueState) -> Iterator[str]:
    """A step is open while an actor has not finished all its acts of it."""
    ended = [state.finished(actor) // actor.acts for actor in state.actors]
    open_steps = range(min(ended, default=state.begun), state.begun)
    expected = {step: sum(end <= step for end in ended) for step in open_steps}
    if dict(state.left) != expected:
        yield f"actors left by step are {dict(state.left)}, expected {expected}"


RULES: tuple[Rule, ...] = (
    acts_follow_each_other,
    the_order_is_kept,
    conditions_are_counted,
    who_may_act_is_ready,
    copies_are_within_credits,
    versions_are_read_by_all,
    other_queues_answer_once,
    steps_end_when_all_have_acted,
)


def check_rank(states: Mapping[str, QueueState]) -> None:
    """Check what holds between the queues of a rank while no event is on its way between them.

    Raises:
        InternalError: naming the registers of which two queues disagree.
    """
    broken = [text for state in states.values() for text in _disagreements(state, states)]
    if not any(state.left or state.running for state in states.values()):
        broken += [text for state in states.values() for text in _unlike_the_start(state)]
    if broken:
        raise InternalError("\n  ".join(("the queues of a rank disagree:", *broken)))


def _disagreements(state: QueueState, states: Mapping[str, QueueState]) -> Iterator[str]:
    """Readers know of every version; the producer's queue awaits just those that still read one."""
    for port in state.ports.values():
        others = [states[queue].ports[port.register] for queue in port.queues]
        for other in others:
            if other.arrived != port.arrived:
                yield f"{port.register} has {port.arrived} versions, {other.arrived} of them known"
        reading = Counter(version for other in others for version in other.local)
        awaited = {version: n for version, n in port.remote.items() if n}
        if reading != awaited:
            yield f"{port.register}: {dict(reading)} queues read, {awaited} are awaited"


def _unlike_the_start(state: QueueState) -> Iterator[str]:
    """After whole steps the registers hold as much as before the first: every step begins alike."""
    for port in state.ports.values():
        read = bool(port.count or port.queues)
        if port.producer is not None and port.taken != (port.full and read):
            yield f"{port.register} holds {port.taken} versions between two steps, not {port.full}"
