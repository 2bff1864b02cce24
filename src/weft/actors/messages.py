"""What goes into a queue's state machine (events) and what comes out (actions).

Named tuples, because a step makes one of them for every edge of the plan and they cost a third of a
frozen dataclass. Versions count from 0 for each register: an actor's act in step `s` reads version
`s` of what it consumes; it makes version `s` of an ordinary register and version `s + 1` of one
that was full before the first step.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Begin(NamedTuple):
    """Event: every actor may now act for step `step`; steps begin in order."""

    step: int


class Ready(NamedTuple):
    """Event (`req`): version `version` of `register`, produced on another queue, may be read."""

    register: str
    version: int


class Released(NamedTuple):
    """Event (`ack`): another queue has no reader left for version `version` of `register`."""

    register: str
    version: int


class Finished(NamedTuple):
    """Event: the actor that was told to act has done so."""

    actor: int
    step: int


class Act(NamedTuple):
    """Action: run actor `actor` for step `step`, then report `Finished`."""

    actor: int
    step: int


class Send(NamedTuple):
    """Action: hand `event` to the machine of `queue`."""

    queue: str
    event: Ready | Released


class Free(NamedTuple):
    """Action: no actor of this queue will read version `version` of `register` (again): drop this queue's reference."""

    register: str
    version: int


class EndStep(NamedTuple):
    """Action: every actor of this queue has acted for step `step`."""

    step: int


Event: TypeAlias = Begin | Ready | Released | Finished
Action: TypeAlias = Act | Send | Free | EndStep
