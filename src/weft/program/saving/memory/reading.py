"""The files that a process reads of a snapshot, brought to its host from others where it is not."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, final

from torch import Tensor

from weft.errors import UNREADABLE, DamagedCheckpoint
from weft.program.agreement import agreed, told
from weft.program.saving.files import Extent, check_extents
from weft.program.saving.manifest import NAME, Manifest
from weft.program.saving.memory.generations import FileMove, Generation, Shelf, moves_of
from weft.program.saving.memory.mapped import MappedFile, in_pieces, mapped_to_read
from weft.program.saving.memory.places import (
    RECORD,
    UNSURE,
    free_bytes,
    part_folder,
)
from weft.program.saving.memory.plan import manifest_text
from weft.runtime.world.world import World
from weft.units import bytes_text

Pieces: TypeAlias = dict[int, list[Tensor]]
# A folder of links to files of one generation, as those of a checkpoint lie.
_VIEW = "view"
_log = logging.getLogger("weft")
# All files of a snapshot, in the place of their names.
_ALL = "*"


@final
class SnapshotReading:
    """One snapshot, as a folder of each host that `load` takes for a checkpoint. Use as a context, on every process.

    Attributes:
        folder: of this host.
    """

    def __init__(self, world: World, shelf: Shelf, generation: Generation) -> None:
        self.folder = shelf.folder / _VIEW
        self._world, self._shelf, self._generation = world, shelf, generation

    def __enter__(self) -> SnapshotReading:
        """Bring all records together.

        Raises:
            DamagedCheckpoint: on all processes: a part lies on no host any more, or a record is damaged.
        """
        world, shelf, generation = self._world, self._shelf, self._generation
        if generation.lacking:
            raise DamagedCheckpoint(
                f"the snapshot of step {generation.step} in memory lacks the parts of ranks {generation.lacking}: "
                "their hosts were lost with those of their copies; load another checkpoint"
            )
        texts = told(world, "records", lambda: json.dumps(self._records()))
        every: dict[str, str] = {}
        for host in shelf.hosts.firsts:
            every |= json.loads(texts[host])
        agreed(world, "a folder of links", lambda: self._begin(every.values()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._shelf.is_first_here:
            shutil.rmtree(self.folder, ignore_errors=True)

    def bring(self, manifest: Manifest, files: Collection[str]) -> None:
        """Have files on this host, and check them. Every process must call it, each with what it reads.

        In the place of one that is damaged comes the copy of another host.

        Raises:
            DamagedCheckpoint: on all processes: no host has one as it was written, or a host has no room for it.
        """
        world, hosts = self._world, self._shelf.hosts
        members = {each[0]: each for each in hosts.members.values()}
        wanted, damaged = self._wanted(manifest, files), dict[int, set[str]]()
        while any(wanted.values()):
            moves = moves_of(self._generation, wanted, members, damaged)
            sends, receives = agreed(world, "room for files", lambda: self._opened(moves))  # noqa: B023
            if moves:
                self._shelf.line.swap(sends, receives)
            agreed(world, "links to files", lambda: self._link(wanted, damaged))  # noqa: B023
            texts = told(world, "the files", lambda: json.dumps(self._damaged(manifest, wanted)))  # noqa: B023
            sources = {(hosts.first(x.receiver), x.file): hosts.first(x.sender) for x in moves}
            wanted = {host: set() for host in members}
            for process in range(len(hosts.names)):
                host = hosts.first(process)
                for file, error in json.loads(texts[process]).items():
                    wanted[host].add(file)
                    damaged.setdefault(sources.get((host, file), host), set()).add(file)
                    if 0 in world.ranks:
                        _log.warning("%s; a copy of it is looked for on other hosts", error)

    def _wanted(self, manifest: Manifest, files: Collection[str]) -> dict[int, set[str]]:
        """The files that processes read, by the first process of their host."""
        every = {extent.file for each in manifest.tensors.values() for extent in each.extents}
        own = _ALL if every <= set(files) else sorted(files)
        texts = told(self._world, "files that are read", lambda: json.dumps(own))
        hosts = self._shelf.hosts
        wanted: dict[int, set[str]] = {host: set() for host in hosts.firsts}
        for process in range(len(hosts.names)):
            read = json.loads(texts[process])
            wanted[hosts.first(process)] |= every if read == _ALL else set(read)
        return wanted

    def _records(self) -> dict[int, str]:
        """The records that this host alone tells, by the process that saved them."""
        if not self._shelf.is_first_here:
            return {}
        held, own = self._generation.held, self._shelf.line.process
        before = {x for host, parts in held.items() if host < own for x in parts}
        texts = {}
        for process in held[own].keys() - before:
            place = self._place(process)
            record = place / RECORD
            try:
                texts[process] = (record if record.exists() else place / UNSURE).read_text()
            except OSError as error:
                raise DamagedCheckpoint(
                    f"{place} cannot be read: {error.strerror}; load another checkpoint"
                ) from None
        return texts

    def _place(self, process: int) -> Path:
        of = self._generation
        return part_folder(self._shelf.folder, of.start, of.turn, process)

    def _begin(self, records: Iterable[str]) -> None:
        if not self._shelf.is_first_here:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.mkdir(mode=0o700)
            (self.folder / NAME).write_text(manifest_text(records))
        except OSError as error:
            raise DamagedCheckpoint(
                f"cannot write into {self.folder}: {error.strerror}; give memory file systems more room, or load "
                "another checkpoint"
            ) from None
        except UNREADABLE as error:
            raise DamagedCheckpoint(
                f"a record of the snapshot of step {self._generation.step} in memory is damaged: "
                f"{type(error).__name__}: {error}; load another checkpoint"
            ) from None

    def _opened(self, moves: Sequence[FileMove]) -> tuple[Pieces, Pieces]:
        """Pieces that this process sends, and those of the files that it makes for what comes."""
        first, own = self._shelf.hosts.first, self._shelf.line.process
        comes = sum(move.bytes for move in moves if first(move.receiver) == first(own))
        if comes and comes > free_bytes(self._shelf.folder):
            raise DamagedCheckpoint(
                f"{self._shelf.folder} has no room for {bytes_text(comes)} that ranks of its host read of a snapshot "
                "on other hosts; load another checkpoint"
            )
        sends: Pieces = {}
        receives: Pieces = {}
        try:
            for move in moves:
                if move.sender == own:
                    there = mapped_to_read(self._place(move.saved_by) / move.file)
                    sends.setdefault(move.receiver, []).extend(in_pieces(there))
                if move.receiver == own:
                    (self.folder / move.file).unlink(missing_ok=True)  # it is damaged
                    came = MappedFile(self.folder / move.file, move.bytes).bytes
                    receives.setdefault(move.sender, []).extend(in_pieces(came))
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise DamagedCheckpoint(
                f"{self.folder} and the files of a snapshot cannot be read or made: {error}; load another checkpoint"
            ) from None
        return sends, receives

    def _link(
        self, wanted: Mapping[int, Collection[str]], damaged: Mapping[int, Collection[str]]
    ) -> None:
        """Show the files of this host in the folder."""
        own = self._shelf.line.process
        if self._shelf.is_first_here:
            try:
                for file, (process, _) in self._generation.files(own).items():
                    if file in wanted[own] and file not in damaged.get(own, ()):
                        os.link(self._place(process) / file, self.folder / file)
            except OSError as error:
                raise DamagedCheckpoint(
                    f"cannot show files of a snapshot in {self.folder}: {error}; load another checkpoint"
                ) from None

    def _damaged(self, manifest: Manifest, wanted: Mapping[int, Collection[str]]) -> dict[str, str]:
        """The files that are damaged, and how, of those that fall to this process: of its host's all are checked."""
        hosts, own = self._shelf.hosts, self._shelf.line.process
        members = hosts.members[hosts.names[own]]
        files = sorted(wanted[hosts.first(own)])[members.index(own) :: len(members)]
        extents: dict[str, list[tuple[Extent, str]]] = {file: [] for file in files}
        for each in manifest.tensors.values():
            for extent in each.extents:
                if extent.file in extents:
                    extents[extent.file].append((extent, each.dtype))
        found = {}
        for file, boxes in extents.items():
            try:
                check_extents(self.folder, boxes)
            except DamagedCheckpoint as error:
                found[file] = str(error).partition("; load another")[0]
        return found
