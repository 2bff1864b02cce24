"""One act of a step on a device on which work is only put on a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

# A register, and the number of a version among those of the step.
Key: TypeAlias = "tuple[str, int]"


@final
@dataclass(frozen=True)
class Read:
    """A version that an act takes: whether no later act does, and whether another queue made it."""

    key: Key
    last: bool
    foreign: bool


@final
@dataclass(frozen=True)
class Launch:
    """One act of a step.

    Attributes:
        place: its place in the list.
        actor, micro: the act.
        queue: whose stream it goes to; feeding and fetching move nothing, so they go to compute's.
        reads: tensors that it takes, as `Work.reads` lists them.
        writes: for each of `Work.writes`, the version that is complete then; None in the middle of
            one, or where nobody reads it.
        waits: places of acts of other queues that must have ended; none that its queue has waited
            for already.
    """

    place: int
    actor: int
    micro: int
    queue: str
    reads: tuple[Read, ...]
    writes: tuple[Key | None, ...]
    waits: tuple[int, ...]
