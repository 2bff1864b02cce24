"""The order in which the acts of a step begin and end, where nobody has simulated it: the order of the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, final

from weft.compiler.memory.act import ActMemory
from weft.ir.alias import Kind
from weft.ir.plan import Actor, Communicate, Fetch, Hold, RankPlan
from weft.simulator.clock import Timed
from weft.units import Bytes


@final
class Moment(NamedTuple):
    """An act begins or ends."""

    begins: bool
    actor: int
    micro: int


def moments(plan: RankPlan) -> Iterator[Moment]:
    """The acts of one step, micro-batch after micro-batch.

    A communication continues beside what follows, until somebody reads what it makes or the next one
    on its queue begins.
    """
    open_acts: dict[str, tuple[Communicate, int]] = {}
    for actor, micro in _acts(plan):
        for queue, (other, number) in tuple(open_acts.items()):
            if queue == actor.queue or not set(other.produces).isdisjoint(actor.consumes):
                del open_acts[queue]
                yield Moment(False, other.id, number)
        yield Moment(True, actor.id, micro)
        if isinstance(actor, Communicate):
            open_acts[actor.queue] = (actor, micro)
        else:
            yield Moment(False, actor.id, micro)
    for other, number in open_acts.values():
        yield Moment(False, other.id, number)


def _acts(plan: RankPlan) -> Iterator[tuple[Actor, int]]:
    """The acts that run once a step before the loop, the loop, and the acts that come after it."""
    actors = [actor for actor in plan.actors if not isinstance(actor, Hold)]
    looping = [place for place, actor in enumerate(actors) if actor.acts > 1]
    first, last = (looping[0], looping[-1] + 1) if looping else (len(actors), len(actors))
    loop = [actors[place] for place in looping]
    made = {name for actor in loop for name in actor.produces}
    before, behind = actors[:first], list[Actor]()
    for actor in actors[first:last]:
        if actor.acts == 1:
            late = not made.isdisjoint(actor.consumes)
            (behind if late else before).append(actor)
            made.update(actor.produces if late else ())
    yield from ((actor, 0) for actor in before)
    for micro in range(plan.micro_batches if loop else 0):
        yield from ((actor, micro) for actor in loop)
    yield from ((actor, 0) for actor in (*behind, *actors[last:]))


def moments_of(timeline: Iterable[Timed]) -> Iterator[Moment]:
    """The acts of one rank as a simulation timed them; what ends comes before what begins at the same time."""
    events: list[tuple[float, int, int, Moment]] = []
    for number, each in enumerate(timeline):
        brief = each.end <= each.start
        events.append((each.start, 1, 2 * number, Moment(True, each.actor, each.micro)))
        end = Moment(False, each.actor, each.micro)
        events.append((each.end, int(brief), 2 * number + 1, end))
    return (moment for _, _, _, moment in sorted(events))


@final
class Base(NamedTuple):
    """A storage on which a register stands: its name, its versions in a step (0 for no register), and what it takes.

    `fresh` is kind and bytes where the act makes it; None if it was read.
    """

    name: str
    rate: int
    fresh: tuple[Kind, Bytes] | None


@final
class FilledRegister(NamedTuple):
    """A register that an actor fills.

    Attributes:
        rate: its versions in a step.
        on: its storage.
        under: another storage that it may be a view of; None if there is none.
    """

    name: str
    rate: int
    readers: int
    on: Base
    under: Base | None = None


@final
class ActVersions(NamedTuple):
    """The versions that the acts of an actor read and leave.

    Attributes:
        reads: registers that they read, with versions in a step.
        gives: true if what they read is given to the caller.
        kept: what is there from the first act on.
        left: what each act leaves at its end.
    """

    acts: int
    reads: tuple[tuple[str, int], ...]
    gives: bool
    kept: tuple[FilledRegister, ...]
    left: tuple[FilledRegister, ...]


def versions_of(plan: RankPlan, acts: Sequence[ActMemory]) -> list[ActVersions]:
    """The versions of every actor of a plan; `acts` are their effects on memory."""
    registers = {each.value.name: each for each in plan.registers}

    def standing(name: str, act: ActMemory) -> Base:
        rate = registers[name].rate if name in registers else 0
        return Base(name, rate, act.fresh.get(name))

    found = []
    for actor, act in zip(plan.actors, acts, strict=True):
        left = []
        for name, base in act.bases.items():
            if own := registers.get(name):
                under = standing(act.under[base], act) if base in act.under else None
                left.append(
                    FilledRegister(name, own.rate, len(own.consumers), standing(base, act), under)
                )
        found.append(
            ActVersions(
                actor.acts,
                tuple([(name, registers[name].rate) for name in actor.consumes]),
                isinstance(actor, Fetch),
                tuple([each for each in left if each.on.name in act.kept]),
                tuple([each for each in left if each.on.name not in act.kept]),
            )
        )
    return found
