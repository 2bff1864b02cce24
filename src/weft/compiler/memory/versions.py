"""The versions of registers that the acts of each actor read and leave, read off a plan once for all its acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from weft.compiler.memory.kinds import ActMemory
from weft.compiler.memory.order import acts_of
from weft.ir.alias import Kind
from weft.ir.plan import Fetch, RankPlan, Register
from weft.units import Bytes


@final
class Base(NamedTuple):
    """A storage on which a register stands: its name, its versions in a step (0 for no register), and what it takes.

    `fresh` is kind and bytes where the act makes it; None where it was read.
    """

    name: str
    rate: int
    fresh: tuple[Kind, Bytes] | None


@final
class Left(NamedTuple):
    """A register that an actor fills.

    Attributes:
        name: of the register.
        rate: its versions in a step.
        readers: how many actors read each.
        base: the name of what it stands on.
        base_rate: versions of that in a step; 0 where it is no register.
        fresh: kind and bytes of a storage of its own; None where it looks at what was read.
        under: what it may look at besides; None where it does not.
    """

    name: str
    rate: int
    readers: int
    base: str
    base_rate: int
    fresh: tuple[Kind, Bytes] | None
    under: Base | None = None


@final
class ActVersions(NamedTuple):
    """The versions that the acts of an actor read and leave.

    Attributes:
        acts: how many there are in a step.
        reads: registers that they read, with versions in a step.
        gives: true where what they read is given to the caller.
        kept: what is there from the first act on.
        left: what each act leaves at its end.
    """

    acts: int
    reads: tuple[tuple[str, int], ...]
    gives: bool
    kept: tuple[Left, ...]
    left: tuple[Left, ...]


def versions_of(plan: RankPlan, acts: Sequence[ActMemory]) -> list[ActVersions]:
    """The versions of every actor of a plan; `acts` are their effects on memory."""
    registers = {each.value.name: each for each in plan.registers}
    found = []
    for actor, act in zip(plan.actors, acts, strict=True):
        left = [
            _left(registers, name, base, act)
            for name, base in act.bases.items()
            if name in registers
        ]
        found.append(
            ActVersions(
                acts_of(actor),
                tuple([(name, registers[name].rate) for name in actor.consumes]),
                isinstance(actor, Fetch),
                tuple([each for each in left if each.base in act.kept]),
                tuple([each for each in left if each.base not in act.kept]),
            )
        )
    return found


def _left(registers: Mapping[str, Register], name: str, base: str, act: ActMemory) -> Left:
    own, on = registers[name], _standing(registers, base, act)
    root = act.under.get(base)
    under = None if root is None else _standing(registers, root, act)
    return Left(name, own.rate, len(own.consumers), *on, under)


def _standing(registers: Mapping[str, Register], name: str, act: ActMemory) -> Base:
    below = registers.get(name)
    return Base(name, 0 if below is None else below.rate, act.fresh.get(name))
