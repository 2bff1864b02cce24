"""Start one process for each rank of this node, watch them, and end them all when one fails.

Nothing listens anywhere for this: ranks of one node meet in a file (`weft.runtime.world.meeting`). The end of
each process is seen when it happens, so that the first is known. This module needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias, final

from weft.runtime.world.interrupts import Interrupts
from weft.runtime.world.processes import SHUTDOWN_SECONDS as SHUTDOWN_SECONDS
from weft.runtime.world.processes import Elsewhere as Elsewhere
from weft.runtime.world.processes import Exit as Exit
from weft.runtime.world.processes import Happening, Interrupted, Processes, Said

# Seconds that other ranks have to end by themselves when one has failed: those that do not are the ones
# that do not answer.
SETTLE_SECONDS = 1.0


@final
@dataclass(frozen=True)
class Fleet:
    """The processes of this node, among all of the job.

    Attributes:
        ranks: processes on this node.
        first: the rank of the first of them; the others follow.
        node, nodes: number of this node, from 0, and how many there are.
    """

    ranks: int
    first: int = 0
    world: int = 0
    node: int = 0
    nodes: int = 1

    def environment(self, local: int) -> dict[str, str]:
        """The variables of one process, by its number on this node, under the names that torchrun gives them."""
        values = {
            "RANK": self.first + local,
            "LOCAL_RANK": local,
            "WORLD_SIZE": self.world or self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
        }
        return {name: str(value) for name, value in values.items()}


@final
@dataclass(frozen=True)
class Ending:
    """The end of the processes of a node.

    Attributes:
        exits: of all of them, in the order of time.
        elsewhere: the failure of another node that ended them, where there was one.
    """

    exits: tuple[Exit, ...]
    elsewhere: Elsewhere | None = None

    @property
    def failed(self) -> bool:
        """True where a process, or another node, has failed."""
        return self.elsewhere is not None or any(each.code for each in self.exits)


# Leads processes on in place after something has happened to one of them: None where they go on, else what ends them.
Lead: TypeAlias = Callable[[Processes, Happening], Happening | None]


def launch(
    command: Sequence[str],
    fleet: Fleet,
    environment: Mapping[str, str],
    events: SimpleQueue[Any] | None = None,
    tell: Callable[[Exit], object] = lambda _: None,
    interrupts: Interrupts | None = None,
    asks: int | None = None,
    lead: Lead | None = None,
    grace: float = SHUTDOWN_SECONDS,
) -> Ending:
    """Run `command` once for each rank of this node and wait for all of them.

    Each process shares the cores fairly with the others unless OMP_NUM_THREADS says otherwise.

    Args:
        command: program and arguments.
        fleet: how many, and which ranks.
        environment: variables of all processes, without those of `Fleet.environment`.
        events: where failures of other nodes come as `Elsewhere`.
        tell: called with each end.
        interrupts: signals that tell this process to end. One that comes when a process has failed changes nothing. A
            second Ctrl-C ends the processes at once.
        asks: a signal for processes that still run a while after another one has failed, before they are told to end.
        lead: leads those that are left on in place; with it, processes get lines.
        grace: seconds that processes have to end when this process was told to end.

    Returns:
        how all of them ended, of the last world.

    Raises:
        KeyboardInterrupt: when this process was told to end; the ranks have ended then.
    """
    queue: SimpleQueue[Any] = SimpleQueue() if events is None else events
    all_variables = {**environment, **_threads(fleet.ranks)}
    found = Processes(command, all_variables, queue, tell, has_lines=lead is not None)
    first: Happening | None = None

    def interrupted() -> None:
        queue.put(Interrupted())

    with (interrupts or Interrupts()).told_to(interrupted, interrupted):
        try:
            for local in range(fleet.ranks):
                found.start(fleet.first + local, fleet.environment(local))
            first = _until_the_end(found, lead)
            if isinstance(first, Exit):
                found.settle(SETTLE_SECONDS)
            if asks is not None and not isinstance(first, Interrupted):
                found.ask(asks)
        finally:
            if found.running or any(each.code for each in found.exits):
                found.end(grace if isinstance(first, Interrupted) else None)
            found.collect()
    if isinstance(first, Interrupted):
        raise KeyboardInterrupt
    return Ending(tuple(found.exits), first if isinstance(first, Elsewhere) else None)


def _until_the_end(found: Processes, lead: Lead | None) -> Happening | None:
    """Wait until something ends the processes, and give that; None where all of them end well."""
    while True:
        first = found.first(hears=lead is not None)
        if lead is None or first is None:
            return first
        ends = lead(found, first)
        if ends is not None:
            # Who has only failed because of others ends now.
            return found.first() if isinstance(ends, Said) else ends


def _threads(ranks: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = str(max(1, (cores or 1) // ranks))
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share)}
