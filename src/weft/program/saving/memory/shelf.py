"""The place of a run's snapshots, and the line over which its processes exchange them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import final

from weft.program.everyone import told
from weft.program.saving.memory.hosts import BuddyLine, Hosts
from weft.program.saving.memory.places import (
    folder_of,
    host_folder,
    host_name,
    part_folder,
    starts,
)
from weft.runtime.world.world import World


@final
@dataclass(frozen=True)
class Shelf:
    """The place of a run's snapshots, once all processes know each other's hosts.

    Attributes:
        folder: of them on this host.
        start: number of this start of the program.
        line: to the other processes.
    """

    folder: Path
    start: int
    line: BuddyLine

    @property
    def hosts(self) -> Hosts:
        """Of all processes."""
        return self.line.hosts

    @property
    def is_first_here(self) -> bool:
        """True in the process that does what one alone has to do on this host."""
        return self.hosts.first(self.line.process) == self.line.process

    def part(self, turn: int, process: int) -> Path:
        """The folder of what a process saves."""
        return part_folder(self.folder, self.start, turn, process)


def shelf_of(world: World, checkpoints: Path) -> Shelf:
    """Find the place. Every process must call it.

    Raises:
        UserError: on all processes, where a host has no folder for snapshots.
    """
    folders: list[Path] = []

    def tell() -> str:
        host = host_folder()
        folders.append(folder_of(host, checkpoints))
        folders[0].mkdir(mode=0o700, exist_ok=True)
        return json.dumps([host_name(host), max(starts(folders[0]), default=0)])

    # A process that has all ranks is one.
    alone = len(world.ranks) == world.size
    texts = told(world, "the hosts", tell)[: 1 if alone else None]
    names, last = zip(*map(json.loads, texts), strict=True)
    process = 0 if alone else world.ranks[0]
    line = BuddyLine(world.host_channel(), Hosts(tuple(names)), process)
    return Shelf(folders[0], 1 + max(last), line)
