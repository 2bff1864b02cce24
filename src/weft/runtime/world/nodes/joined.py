"""One node of a job among the others, during one start of the ranks: they tell each other of ends and failures."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, final

from weft.runtime.world.launch import Elsewhere, Exit, Fleet
from weft.runtime.world.nodes.client import Client

# Of one start: the first failure.
FAILED = "failed"


def ended_key(rank: int, start: int) -> str:
    """The name of a rank's exit code in the store, once it has ended.

    Args:
        start: of the ranks, from 0.
    """
    return f"weft/ended/{start}/{rank}"


def start_key(start: int, name: object) -> str:
    """The name of an entry of launchers that is of one start."""
    return f"weft/launcher/{start}/{name}"


@final
@dataclass(frozen=True)
class Joined:
    """This node, once all have come.

    Attributes:
        fleet: its ranks.
        environment: what these need to meet the others.
        events: gets the failures of other nodes.
        start: of the ranks, from 0.
    """

    fleet: Fleet
    environment: Mapping[str, str]
    events: SimpleQueue[Any]
    client: Client
    start: int = 0

    @property
    def failed(self) -> str:
        """The name of the entry that tells of the first failure."""
        return start_key(self.start, FAILED)

    def say_ended(self, end: Exit) -> None:
        """Tell the ranks of all nodes that one has ended."""
        with suppress(OSError):  # the store has gone, and with it all who would read
            self.client.set(ended_key(end.rank, self.start), str(end.code).encode())

    def left(self) -> tuple[int, ...]:
        """Ranks of other nodes that have ended with exit code 0."""
        own = range(self.fleet.first, self.fleet.first + self.fleet.ranks)
        with suppress(OSError):
            return tuple(
                rank
                for rank in range(self.fleet.world)
                if rank not in own
                and self.client.check([ended_key(rank, self.start)])
                and self.client.get(ended_key(rank, self.start), 0) == b"0"
            )
        return ()

    def say_failed(self, text: str) -> Elsewhere | None:
        """Tell the other nodes what has failed here; gives what one of them has told before."""
        own = f"{here(self.fleet)}: {text}".encode()
        with suppress(OSError):
            found = self.client.compare_set(self.failed, b"", own)
            return None if found == own else Elsewhere(found.decode())
        return None

    def failure(self, seconds: float) -> Elsewhere | None:
        """The failure that another node tells within so many seconds."""
        with suppress(OSError):  # none, or the store has gone
            return Elsewhere(self.client.get(self.failed, seconds).decode())
        return None

    def finish(self) -> Elsewhere | None:
        """Say that this node is done, and wait until all are, or until one has failed; gives that failure."""
        keys = [start_key(self.start, f"done/{each}") for each in range(self.fleet.nodes)]
        self.client.will(self.failed, None)
        self.client.set(keys[self.fleet.node], b"")
        while not self.client.check(keys):
            if self.client.check([self.failed]):
                return Elsewhere(self.client.get(self.failed, 0).decode())
            with suppress(TimeoutError):
                self.client.wait(keys, 0)
        return None


def here(fleet: Fleet) -> str:
    """The name of a node for messages."""
    return f"node {fleet.node} ({socket.gethostname()})"
