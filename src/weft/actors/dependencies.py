"""The dependencies of an act, which must be there before it may begin: read off the plan, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

from weft.ir.plan import Actor, Hold, RankPlan, Register


@final
class ActKey(NamedTuple):
    """An act: an actor's id, and how often it has acted before, over all steps."""

    actor: int
    number: int


@final
class Dependency(NamedTuple):
    """A condition of an act: another act must have ended.

    Attributes:
        register: through which the two are tied.
        act: the other one.
        copy: true where it gives a copy of the register back; otherwise it makes a version of it.
    """

    register: str
    act: ActKey
    copy: bool


@final
class Tie(NamedTuple):
    """Another actor that an actor depends on through a register, whichever of its acts it is.

    Attributes:
        other: the other actor's id.
        acts: how often it acts in a step.
        rate: versions of the register in a step.
        behind: how many versions the one that ties them is behind the one that the act reads or makes, which is
            counted as if the register had been empty at first.
        copy: true where the other one gives a copy back, which only the first act of a version waits for.
    """

    other: int
    acts: int
    rate: int
    behind: int
    copy: bool


@final
class Dependencies:
    """The conditions of the acts of one rank.

    Args:
        plan: the rank's.
    """

    def __init__(self, plan: RankPlan) -> None:
        self._actors = plan.actors
        self._registers = {register.value.name: register for register in plan.registers}

    def of(self, act: ActKey) -> Iterator[Dependency]:
        """The dependencies of an act, in steps that have been."""
        actor = self._actors[act.actor]
        for name in actor.consumes:
            register = self._registers[name]
            producer = self._actors[register.producer]
            version = _version(actor, register, act.number) - register.full
            if version >= 0 and not isinstance(producer, Hold):
                yield Dependency(name, _last(producer, register, version), copy=False)
        for name in actor.produces:
            yield from self._copies(actor, self._registers[name], act.number)

    def ties(self, actor: Actor) -> Iterator[Tie]:
        """All that acts of an actor depend on, in the order of `of`: of registers that are alike, each tie again."""
        for name in actor.consumes:
            register = self._registers[name]
            producer = self._actors[register.producer]
            if not isinstance(producer, Hold):
                yield Tie(producer.id, producer.acts, register.rate, register.full, copy=False)
        for name in actor.produces:
            register = self._registers[name]
            behind = register.credits - register.full
            for reader in register.consumers:
                acts = self._actors[reader].acts
                yield Tie(reader, acts, register.rate, behind, copy=True)

    def _copies(self, actor: Actor, register: Register, number: int) -> Iterator[Dependency]:
        """The readers that must be done with the version whose copy an act takes."""
        if number * register.rate % actor.acts:
            return  # an earlier act has taken it
        version = _version(actor, register, number) + register.full - register.credits
        if version >= 0:
            for reader in register.consumers:
                last = _last(self._actors[reader], register, version)
                yield Dependency(register.value.name, last, copy=True)


def dependencies_in_step(plan: RankPlan) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """For each act of a step, (actor, micro-batch), those of the same step that must end before it.

    It is the same in all steps.
    """
    needs = Dependencies(plan)
    # In this step every version that the plan speaks of has been before.
    step = 1 + max((register.credits for register in plan.registers), default=0)
    found = {}
    for actor in plan.actors:
        for micro in range(0 if isinstance(actor, Hold) else actor.acts):
            of = needs.of(ActKey(actor.id, step * actor.acts + micro))
            times = (
                (act.actor, *divmod(act.number, plan.actors[act.actor].acts)) for _, act, _ in of
            )
            own = dict.fromkeys((id, part) for id, when, part in times if when == step)
            found[actor.id, micro] = tuple(own)
    return found


def _version(actor: Actor, register: Register, number: int) -> int:
    """The version that an act reads, or makes of a register that was empty at first."""
    return number * register.rate // actor.acts


def _last(actor: Actor, register: Register, version: int) -> ActKey:
    """The last act of an actor that reads a version, or that makes it (of one empty at first)."""
    return ActKey(actor.id, (version + 1) * actor.acts // register.rate - 1)
