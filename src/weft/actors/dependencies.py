"""The dependencies of an act, which must be there before it may begin: read off the plan, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias, final

from weft.ir.plan import Actor, Hold, RankPlan

# A dependency: an actor's act for a micro-batch, so many steps before.
Wait: TypeAlias = "tuple[int, int, int]"


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
        copy: true if the act gives back a copy of the register; otherwise it makes a version.
    """

    register: str
    act: ActKey
    copy: bool


@final
class Tie(NamedTuple):
    """Another actor that an actor depends on through a register, for any of its acts.

    Attributes:
        other: the other actor's id.
        acts: how often it acts in a step.
        rate: versions of the register in a step.
        behind: how many versions before the version of the act the tying version is, as
            if the register had been empty at first.
        copy: true if the other actor gives back a copy, which only the first act of a version waits for.
    """

    other: int
    acts: int
    rate: int
    behind: int
    copy: bool

    def awaited(self, number: int, acts: int) -> int | None:
        """The number of the other actor's act that an act waits for, below 0 before the first step; None for none.

        Args:
            number: of the act.
            acts: of its actor in a step.
        """
        made = number * self.rate
        if self.copy and made % acts:
            return None  # an earlier act has taken the copy
        return (made // acts - self.behind + 1) * self.acts // self.rate - 1


def dependencies(plan: RankPlan, act: ActKey) -> Iterator[Dependency]:
    """The dependencies of an act of a rank, in steps that have been."""
    actor = plan.actors[act.actor]
    for register, tie in _ties(plan, actor):
        number = tie.awaited(act.number, actor.acts)
        if number is not None and number >= 0:
            yield Dependency(register, ActKey(tie.other, number), tie.copy)


def waits_of(plan: RankPlan) -> Iterator[tuple[tuple[int, int], tuple[Wait, ...]]]:
    """For each act of a step, (actor, micro-batch), the acts that it waits for, in all steps that have them."""
    # In this step every version that the plan speaks of has been before.
    late = 1 + max((register.credits for register in plan.registers), default=0)
    for actor in plan.actors:
        if isinstance(actor, Hold):
            continue
        acts, ties = actor.acts, dict.fromkeys(tie for _, tie in _ties(plan, actor))
        for micro in range(acts):
            found: dict[Wait, None] = {}
            for tie in ties:
                number = tie.awaited(late * acts + micro, acts)
                if number is not None:
                    step, part = divmod(number, tie.acts)
                    found[tie.other, part, late - step] = None
            yield (actor.id, micro), tuple(found)


def dependencies_in_step(plan: RankPlan) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """For each act of a step, (actor, micro-batch), the acts of the same step that must end before it.

    It is the same in all steps.
    """
    return {
        act: tuple([(other, part) for other, part, back in waits if not back])
        for act, waits in waits_of(plan)
    }


def _ties(plan: RankPlan, actor: Actor) -> Iterator[tuple[str, Tie]]:
    """All that acts of an actor depend on, by register; of registers that are alike, each tie again."""
    actors, registers = plan.actors, plan.register_of
    for name in actor.consumes:
        register = registers[name]
        producer = actors[register.producer]
        if not isinstance(producer, Hold):
            yield name, Tie(producer.id, producer.acts, register.rate, int(register.full), False)
    for name in actor.produces:
        register = registers[name]
        for reader in register.consumers:
            behind = register.credits - register.full
            yield name, Tie(reader, actors[reader].acts, register.rate, behind, True)
