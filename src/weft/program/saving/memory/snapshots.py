"""Snapshots of a program: taken after a step into mapped files of this host, copied to another one meanwhile.

Two generations take turns: one is whole while the other is written. The step that takes a snapshot waits until the
one before is whole, and for a copy of its values.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch

from weft.errors import DamagedCheckpoint
from weft.ir import LogicalGraph
from weft.program.agreement import agreed, told
from weft.program.saving.extras import extras_of, laid_text
from weft.program.saving.memory.generations import Generation, Shelf, generations
from weft.program.saving.memory.mapped import FormedFile, MappedFile
from weft.program.saving.memory.places import TURNS, discount, part_folder, take_away
from weft.program.saving.memory.plan import (
    Files,
    SnapshotPlan,
    entries_of,
    extra_part,
    planned,
    record_text,
)
from weft.program.saving.memory.reading import SnapshotReading
from weft.program.saving.memory.taking import HeldFiles, TakenSnapshot
from weft.program.saving.program_state import ProgramState
from weft.program.saving.save import TIED, files_of
from weft.program.saving.saved_tensors import SavedTensor
from weft.runtime.world.world import World

_log = logging.getLogger("weft")


@final
class Snapshots:
    """The snapshots of a program that belong to the checkpoints of a folder.

    Attributes:
        came_from: start and turn of the generation that the program went on from; None without one.
        off: why none are taken any more; "" as long as they are.
    """

    def __init__(self, world: World, shelf: Shelf) -> None:
        self.shelf = shelf
        self.came_from: tuple[int, int] | None = None
        self.off = ""
        self._world = world
        # By what processes hold.
        self._plans: dict[tuple[str, ...], SnapshotPlan] = {}
        # Of the program so far; alive, so that none takes another one's place.
        self._graphs: list[LogicalGraph] = []
        # Of the generations that take turns, and what they were made for.
        self._held: list[HeldFiles | None] = [None] * TURNS
        self._made_for: list[SnapshotPlan | None] = [None] * TURNS
        self._taken = 0
        self._taking: tuple[int, TakenSnapshot] | None = None

    def take(
        self, state: ProgramState, step: int, about: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> None:
        """Copy what a checkpoint holds; a thread does the rest. Every process must call it.

        Args:
            about: the program, as JSON.

        Raises:
            UserError: on all processes, where `extra` or a tensor is what no checkpoint takes.
            RankFailure: another process has gone.
        """
        self.wait()
        if self.off:
            return
        extras, (kept, numbers) = extras_of(self._world, extra), state.kept()

        def tell() -> str:
            names = json.dumps(kept) + state.beside_the_plan() + laid_text(extras.laid)
            return f"{self._number(state.graph)} {zlib.crc32(names.encode())}"

        texts = tuple(told(self._world, "a snapshot", tell))
        if texts not in self._plans:
            self._plans[texts] = self._planned(state, extras.laid)
        plan = self._plans[texts]
        if not self.off:
            self._prepare(plan)
        if self.off:
            return
        held = self._held[self._taken % TURNS]
        assert held is not None  # it was prepared
        discount(held.places)
        _fill(held, files_of([*entries_of(state, plan.kept), *extras.laid], plan.writers))
        own, file = extra_part(extras)
        told_about = {**about, TIED: plan.tied, **extras.about} if 0 in self._world.ranks else {}

        def record(sums: Sequence[int]) -> str:
            return record_text(plan.fixed, step, sums, own, told_about, numbers)

        self._taken += 1
        self._taking = step, TakenSnapshot(held, record, file, self.shelf.line)

    def wait(self) -> None:
        """Wait until the snapshot that was taken last counts.

        Raises:
            RankFailure: another process has gone.
        """
        if self._taking is None:
            return
        step, taking = self._taking
        self._taking = None
        why = taking.wait()
        if why:
            # The other generation is the one that is whole. Of this one, files may be gone.
            self._taken -= 1
            self._made_for[self._taken % TURNS] = None
            self._say(f"the snapshot of step {step} in memory was dropped: {why}; the run goes on")
        elif self._taken == 1:
            self.came_from = None
            self._take_away()

    def there(self) -> list[Generation]:
        """The snapshots that count, the newest last. Every process must call it."""
        self.wait()
        return generations(self._world, self.shelf)

    @contextmanager
    def reading(self, step: int) -> Iterator[SnapshotReading]:
        """A snapshot to read; where the body ends well, the program goes on from it. Every process must enter it.

        Raises:
            DamagedCheckpoint: on all processes: there is none of that step, or parts of it are lost.
        """
        found = [each for each in self.there() if each.step == step]
        if not found:
            raise DamagedCheckpoint(
                f"no snapshot of step {step} is in memory; load one of saved_in_memory, or a checkpoint"
            )
        newest = found[-1]
        with SnapshotReading(self._world, self.shelf, newest) as reading:
            yield reading
        self.came_from = newest.start, newest.turn
        if newest.start == self.shelf.start and newest.turn == self._taken % TURNS:
            self._taken += 1  # it must not be written over by the next one

    def close(self) -> None:
        """Wait for the last one, and let the line to the others go."""
        try:
            self.wait()
        finally:
            self._held = [None] * TURNS
            if self.shelf.line.channel is not None:
                self.shelf.line.channel.close()

    def _number(self, graph: LogicalGraph) -> int:
        """The number of a graph of the program, the same on all processes: they make the same steps."""
        for number, known in enumerate(self._graphs):
            if known is graph:
                return number
        self._graphs.append(graph)
        return len(self._graphs) - 1

    def _planned(self, state: ProgramState, laid: Sequence[SavedTensor]) -> SnapshotPlan:
        """Plan what each process saves, and see that there is room for it on all hosts. Collective."""
        if self._taken == 0:
            agreed(self._world, "room for snapshots", self._take_away)
        used = sum(held.bytes for held in self._held if held is not None) + self._of_before()
        found, self.off = planned(state, self.shelf, used, laid)
        if self.off:
            self._say(self.off)
        return found

    def _of_before(self) -> int:
        """Bytes of this process's parts of what the program went on from, which go before a second one is made."""
        if self.came_from is None:
            return 0
        parts = (self.shelf.line.process, *self._copied())
        places = [part_folder(self.shelf.folder, *self.came_from, process) for process in parts]
        return sum(file.stat().st_size for place in places for file in place.glob("*"))

    def _prepare(self, plan: SnapshotPlan) -> None:
        """Have files for the generation whose turn it is. All processes find alike whether there are some."""
        turn = self._taken % TURNS
        made_for = self._made_for[turn]
        if made_for is not None and made_for.sizes == plan.sizes:
            return
        self._held[turn], self._made_for[turn] = None, plan

        def make() -> str:
            try:
                self._held[turn] = self._made(turn, plan)
            except OSError as error:
                return f"cannot make files in {self.shelf.folder}: {error.strerror}"
            return ""

        texts = told(self._world, "files for a snapshot", make)
        why = next(filter(None, texts), "")
        if why:
            self._held[turn] = None
            for process in (self.shelf.line.process, *self._copied()):
                shutil.rmtree(self.shelf.part(turn, process), ignore_errors=True)
            self.off = (
                f"no more snapshots in memory: {why}; the run goes on with its checkpoints on disk"
            )
            self._say(self.off)

    def _made(self, turn: int, plan: SnapshotPlan) -> HeldFiles:
        place = _empty(self.shelf.part(turn, self.shelf.line.process))
        own = {file: FormedFile(place / file, form) for file, form in plan.forms.items()}
        copies: dict[int, tuple[Path, Mapping[str, MappedFile]]] = {}
        for process in self._copied():
            there = _empty(self.shelf.part(turn, process))
            sizes, _ = plan.sizes[process]
            copies[process] = there, {n: MappedFile(there / n, size) for n, size in sizes.items()}
        return HeldFiles(place, own, copies)

    def _copied(self) -> tuple[int, ...]:
        return self.shelf.hosts.copied_to(self.shelf.line.process)

    def _take_away(self) -> None:
        """Take away what earlier starts have left but for what the program went on from."""
        if self.shelf.is_first_here:
            take_away(self.shelf.folder, self.came_from, self.shelf.start)

    def _say(self, text: str) -> None:
        if 0 in self._world.ranks:
            _log.warning("%s", text)


def _fill(held: HeldFiles, files: Files) -> None:
    """Copy values into the files of this process."""
    with torch.no_grad():
        for file, each in held.own.items():
            each.fill({name: part for name, (_, part) in files[file].items()})


def _empty(place: Path) -> Path:
    """Make an empty folder for this user alone."""
    shutil.rmtree(place, ignore_errors=True)
    for parent in reversed(place.parents):
        parent.mkdir(mode=0o700, exist_ok=True)
    place.mkdir(mode=0o700)
    return place
