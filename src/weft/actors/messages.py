"""The messages of a queue's state machine: events go in, actions and acts come out.

Named tuples, because a step makes one of them for every edge of the plan and they cost a third of a
frozen dataclass. Versions count from 0 for each register, `rate` of them a step. An actor that acts
once a step reads version `s` in step `s`; one that acts for each of `M` micro-batches reads version
`s * M + m` of a register of rate `M`, and version `s` of one of rate 1 in all acts of step `s`. What
it makes is numbered likewise, plus one in a register that was full before the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final


@final
class Begin(NamedTuple):
    """Event: every actor may now act for step `step`; steps begin in order."""

    step: int


@final
class Ready(NamedTuple):
    """Event (`req`): version `version` of `register`, produced on another queue, may be read."""

    register: str
    version: int


@final
class Released(NamedTuple):
    """Event (`ack`): another queue has no reader left for version `version` of `register`."""

    register: str
    version: int


@final
class Finished(NamedTuple):
    """Event: the act that was started has been done."""

    actor: int
    step: int
    micro: int = 0


@final
class Act(NamedTuple):
    """A start by a machine: run actor `actor` for micro-batch `micro` of step `step`, then report `Finished`."""

    actor: int
    step: int
    micro: int = 0


@final
class Send(NamedTuple):
    """Action: hand `event` to the machine of `queue`."""

    queue: str
    event: Ready | Released


@final
class Free(NamedTuple):
    """Action: drop version `version` of `register`, made on this queue: no actor of this queue reads it.

    Of other versions, the last reader takes the queue's reference along.
    """

    register: str
    version: int


@final
class EndStep(NamedTuple):
    """Action: every actor of this queue has acted for step `step`."""

    step: int


Event: TypeAlias = Begin | Ready | Released | Finished
Action: TypeAlias = Send | Free | EndStep


@final
@dataclass(frozen=True, slots=True)
class Turn:
    """An act of a step, and what it waits for.

    Attributes:
        actor, micro: the act.
        place: of its end in an order of all ends.
        waits: it begins when the first so many ends of that order have been.
    """

    actor: int
    micro: int
    place: int
    waits: int
