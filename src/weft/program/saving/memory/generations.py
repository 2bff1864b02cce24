"""Snapshots that count, in their parts on whatever hosts, and the files that travel to hosts that lack them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

from weft.errors import DamagedCheckpoint
from weft.program.agreement import told
from weft.program.saving.memory.hosts import BuddyLine, Hosts
from weft.program.saving.memory.places import (
    HeldPart,
    folder_of,
    held_parts,
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


@final
@dataclass(frozen=True)
class Generation:
    """A snapshot that counts, in its parts.

    Attributes:
        step: after which it was taken.
        start: of the program, from 1.
        turn: 0 or 1.
        processes: how many have saved a part.
        held: by the first process of each host, the parts there, by the process that saved them.
    """

    step: int
    start: int
    turn: int
    processes: int
    held: Mapping[int, Mapping[int, HeldPart]]

    @property
    def lacking(self) -> list[int]:
        """The processes of whose part no host has a copy."""
        there = {process for parts in self.held.values() for process in parts}
        return sorted(set(range(self.processes)) - there)

    def files(self, host: int) -> dict[str, tuple[int, int]]:
        """The files that a host has: by name, the process that saved it, and bytes."""
        parts = self.held.get(host, {}).values()
        return {n: (part.process, size) for part in parts for n, size in part.files.items()}


def generations(world: World, shelf: Shelf) -> list[Generation]:
    """The snapshots that count, the newest last. Every process must call it."""

    def tell() -> str:
        parts = held_parts(shelf.folder) if shelf.is_first_here else []
        return json.dumps([each.to_json() for each in parts])

    texts = told(world, "snapshots in memory", tell)
    held = {host: [HeldPart(**x) for x in json.loads(texts[host])] for host in shelf.hosts.firsts}
    every = [part for parts in held.values() for part in parts]
    # One that says so of all is enough: the others were about to say it, too.
    whole = {(x.step, x.start, x.turn): x.processes for x in every if x.whole}
    return [
        Generation(
            *key,
            processes,
            {
                host: {x.process: x for x in parts if (x.step, x.start, x.turn) == key}
                for host, parts in held.items()
            },
        )
        for key, processes in sorted(whole.items())
    ]


@final
class FileMove(NamedTuple):
    """A file that one process sends to another, on whose host it is not."""

    file: str
    saved_by: int
    bytes: int
    sender: int
    receiver: int


def moves_of(
    generation: Generation,
    wanted: Mapping[int, Collection[str]],
    members: Mapping[int, Sequence[int]],
    damaged: Mapping[int, Collection[str]],
) -> list[FileMove]:
    """The files that hosts lack, each from one that has it; the work is shared among hosts and their processes.

    Args:
        wanted: files by the first process of the host that wants them.
        members: the processes of each host, by its first.
        damaged: files that a host has, and that are not what was written.

    Raises:
        DamagedCheckpoint: no host has a file that is whole.
    """
    there = {
        host: {n: x for n, x in generation.files(host).items() if n not in damaged.get(host, ())}
        for host in members
    }
    found = []
    for host, files in wanted.items():
        for number, file in enumerate(sorted(set(files) - there[host].keys())):
            having = [each for each in members if file in there[each]]
            if not having:
                raise DamagedCheckpoint(
                    f"no host has {file} of the snapshot of step {generation.step} in memory as it was written; load "
                    "another checkpoint"
                )
            source = having[number % len(having)]
            sender = members[source][number % len(members[source])]
            receiver = members[host][number % len(members[host])]
            found.append(FileMove(file, *there[source][file], sender, receiver))
    return found
