"""Save a program: every process writes its ranks' pieces, and the first puts the checkpoint in its place.

It saves at once, or in a thread while the next steps run.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from weft.atomic_files import write_atomically
from weft.errors import UserError
from weft.layout.layout import Region
from weft.program.agreement import gathered, run_on_all
from weft.program.checkpoint.extras import Extras, extras_of
from weft.program.checkpoint.files import SUFFIX, Extent, slices, write_file
from weft.program.checkpoint.manifest import DTYPES, Manifest, Stored, abandon, begin, publish
from weft.program.checkpoint.program_state import ProgramState, SavedTensor, writers
from weft.units import Seconds

_log = logging.getLogger("weft")
TIED = "tied"
# Name, file, box and checksum of what was written.
Part: TypeAlias = Sequence[Any]
# Between two looks for the files of other processes; and for how long.
_LOOK, _PATIENCE = Seconds(0.02), Seconds(600.0)


@final
@dataclass(frozen=True)
class WriteJob:
    """The part of a checkpoint that one process writes.

    Attributes:
        beside: the folder in which it is written until it is whole.
        files: boxes of tensors, by file and by the tensor's name.
        tensors: whole shape and dtype of all that is saved; `about` is what is not a tensor.
        rank: the first of this process; `processes` are the first ranks of all.
    """

    path: Path
    beside: Path
    files: Mapping[str, Mapping[str, tuple[Region, Tensor]]]
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    about: Mapping[str, Any]
    rank: int
    processes: tuple[int, ...]
    replaces: bool = False

    def copied(self) -> WriteJob:
        """The same job with copies in host memory, so that the tensors may change."""
        with torch.no_grad():
            files = {
                file: {
                    name: (whole, x.detach().to("cpu", copy=True))
                    for name, (whole, x) in each.items()
                }
                for file, each in self.files.items()
            }
        return replace(self, files=files)

    def write(self) -> list[Part]:
        found: list[Part] = []
        for file, each in self.files.items():
            sums = write_file(self.beside, file, each)
            found += [[name, file, whole, sums[name]] for name, (whole, _) in each.items()]
        return found

    def take_away(self) -> None:
        for file in self.files:
            with suppress(OSError):
                (self.beside / file).unlink()

    def publish(self, parts: Sequence[Part]) -> None:
        """Put the checkpoint in its place, once all processes have written."""
        extents: dict[str, list[Extent]] = {}
        for name, file, whole, checksum in parts:
            region = tuple((at, length) for at, length in whole)
            extents.setdefault(name, []).append(Extent(file, name, region, checksum))
        stored = {
            name: Stored(shape, dtype, tuple(extents.get(name, ())))
            for name, (shape, dtype) in self.tensors.items()
        }
        publish(
            self.beside,
            self.path,
            Manifest(self.path, stored, {**self.about, "names": sorted(stored)}),
            self.replaces,
        )


@final
class Writing:
    """A checkpoint that a thread writes, on copies; processes see by files in its folder how far the others are."""

    def __init__(self, work: WriteJob) -> None:
        self._work = work
        self._error: UserError | None = None
        # No daemon: a process that ends has written its checkpoint.
        self._thread = threading.Thread(target=self._run, name="weft checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is written, in the first process until it is in its place; raise what has failed."""
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        work, first = self._work, self._work.rank == self._work.processes[0]
        try:
            self._tell({"parts": work.write()})
            if first:
                work.publish(self._gathered())
        except BaseException as error:  # the others wait for a word of this process
            text = f"cannot write {work.path}: {type(error).__name__}: {error}"
            self._error = error if isinstance(error, UserError) else UserError(text)
            if not threading.main_thread().is_alive():
                _log.error("%s", self._error)  # nobody will ask
            if first:
                abandon(work.beside)
            else:
                work.take_away()  # on a full disk there is room for the note then
                with suppress(UserError):
                    self._tell({"error": str(self._error)})

    def _note(self, rank: int) -> Path:
        return self._work.beside / f"rank-{rank:05d}.json"

    def _tell(self, content: Mapping[str, Any]) -> None:
        write_atomically(self._note(self._work.rank), json.dumps(content), "a note of a checkpoint")

    def _gathered(self) -> list[Part]:
        found: list[Part] = []
        until = time.monotonic() + _PATIENCE
        for rank in self._work.processes:
            note = self._note(rank)
            while not note.exists():
                if time.monotonic() > until:
                    raise UserError(
                        f"rank {rank} has not written its part of {self._work.path} within {_PATIENCE:g} s; "
                        "write to a faster disk"
                    )
                time.sleep(_LOOK)
            content = json.loads(note.read_text())
            if "error" in content:
                raise UserError(f"rank {rank}: {content['error']}")
            found += content["parts"]
            note.unlink()
        return found


def save(
    state: ProgramState,
    path: Path,
    about: Mapping[str, Any],
    extra: Mapping[str, Any],
    before: Writing | None = None,
    wait: bool = True,
    replaces: bool = False,
) -> Writing | None:
    """Write a checkpoint. Every process must call it.

    Args:
        path: a folder on a file system that all processes see.
        before: an earlier checkpoint of the program that may still be written.
        wait: False returns, once all is copied, the work that continues; else the result is None.
        replaces: True puts it in the place of what is there.

    Raises:
        UserError: on all processes, when one cannot write; nothing is at `path` then. Where `before` has failed.
    """
    world = state.setting.world
    first = 0 in world.ranks

    def start() -> str:
        if before is not None:
            before.wait()
        return str(begin(path, replaces)) if first else ""

    beside = Path(gathered(world, "the folder", start)[0])
    try:
        kept, numbers = state.kept()
        extras = extras_of(world, extra)
        entries = [*state.variables(), *state.waiting(), *state.states(kept), *extras.laid]
        # Further names of tensors that have several, each with the first one.
        first_names: dict[str, str] = {}
        named = {entry.name: first_names.setdefault(entry.key, entry.name) for entry in entries}
        tied = {name: other for name, other in named.items() if name != other}
        about = {**about, "numbers": numbers, TIED: tied, **extras.about}
        work = run_on_all(
            world, "what is saved", lambda: _work(state, entries, path, beside, about, extras)
        )
        work = replace(work, replaces=replaces)
        if not wait:
            return Writing(run_on_all(world, "copies in host memory", work.copied))
        written = gathered(world, "the files", lambda: json.dumps(work.write()))
        parts = [each for text in dict.fromkeys(written) for each in json.loads(text)]
        run_on_all(world, "the checkpoint", lambda: work.publish(parts) if first else None)
    except BaseException:
        if first:
            abandon(beside)
        raise
    return None


def _work(
    state: ProgramState,
    entries: Sequence[SavedTensor],
    path: Path,
    beside: Path,
    about: Mapping[str, Any],
    extras: Extras,
) -> WriteJob:
    for entry in entries:
        if entry.dtype not in DTYPES.values():
            raise UserError(
                f"{entry.name} has dtype {entry.dtype}, which safetensors cannot store; expected one of "
                f"{', '.join(DTYPES.values())}"
            )
    files: dict[str, dict[str, tuple[Region, Tensor]]] = {}
    plan = writers(entries)
    for entry in entries:
        for rank, kept in entry.parts.items():
            # Which kernels a rank has decides in which dtype an optimizer counts there.
            part = kept.to(getattr(torch, entry.dtype))
            for number, piece in enumerate(plan.get((entry.name, rank), ())):
                file = f"shard-{rank + 1:05d}-model-{number + 1:05d}{SUFFIX}"
                files.setdefault(file, {})[entry.name] = piece.whole, part[slices(piece.local)]
    if extras.pieces:
        files[extras.file] = dict(extras.pieces)
    tensors = {each.name: (each.shape, each.dtype) for each in entries} | dict(extras.shapes)
    world = state.setting.world
    own = world.ranks[0]
    others = range(world.size) if world.several else (own,)
    return WriteJob(path, beside, files, tensors, about, own, tuple(others))
