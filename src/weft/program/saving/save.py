"""Save a program: every process writes its ranks' pieces, and the first puts the checkpoint in its place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import UserError
from weft.layout.layout import Region
from weft.program.agreement import agreed, told
from weft.program.saving.extras import Extras, extras_of
from weft.program.saving.files import SUFFIX, slices
from weft.program.saving.manifest import DTYPES, abandon, begin
from weft.program.saving.program_state import ProgramState
from weft.program.saving.saved_tensors import Piece, SavedTensor, writers
from weft.program.saving.writing import WriteJob, Writing

TIED = "tied"


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
        about: the program, as `to_json` takes it.
        before: an earlier checkpoint of the program that may still be written.
        wait: False returns as soon as all is copied, and writes meanwhile.
        replaces: True puts it in the place of what is there.

    Returns:
        The work that goes on; None where it is done.

    Raises:
        UserError: on all processes, when one cannot write; nothing is at `path` then. Where `before` has failed.
    """
    world = state.setting.world
    first = 0 in world.ranks

    def start() -> str:
        if before is not None:
            before.wait()
        return str(begin(path, replaces)) if first else ""

    beside = Path(told(world, "the folder", start)[0])
    try:
        kept, numbers = state.kept()
        extras = extras_of(world, extra)
        entries = [*state.variables(), *state.waiting(), *state.states(kept), *extras.laid]
        work = agreed(
            world,
            "what is saved",
            lambda: _work(
                *(state, entries, path, beside),
                {**about, "numbers": numbers, TIED: tied_names(entries)},
                extras,
            ),
        )
        work = replace(work, replaces=replaces)
        if not wait:
            return Writing(agreed(world, "copies in host memory", work.copied))
        written = told(world, "the files", lambda: json.dumps(work.write()))
        parts = [each for text in dict.fromkeys(written) for each in json.loads(text)]
        agreed(world, "the checkpoint", lambda: work.publish(parts) if first else None)
    except BaseException:
        if first:
            abandon(beside)
        raise
    return None


def tied_names(entries: Sequence[SavedTensor]) -> dict[str, str]:
    """Further names of tensors that have several, each with the first one."""
    first: dict[str, str] = {}
    found = {entry.name: first.setdefault(entry.key, entry.name) for entry in entries}
    return {name: other for name, other in found.items() if name != other}


def _work(
    state: ProgramState,
    entries: Sequence[SavedTensor],
    path: Path,
    beside: Path,
    about: Mapping[str, Any],
    extras: Extras,
) -> WriteJob:
    """The job of this process: the pieces of its ranks, and its tensors of the user's own."""
    _check_dtypes(entries)
    files = files_of(entries, writers(entries))
    if extras.pieces:
        files[extras.file] = dict(extras.pieces)
    tensors = {each.name: (each.shape, each.dtype) for each in entries} | dict(extras.shapes)
    world = state.setting.world
    own = world.ranks[0]
    others = range(world.size) if len(world.ranks) < world.size else (own,)
    return WriteJob(path, beside, files, tensors, {**about, **extras.about}, own, tuple(others))


def _check_dtypes(entries: Sequence[SavedTensor]) -> None:
    for entry in entries:
        if entry.dtype not in DTYPES.values():
            raise UserError(
                f"{entry.name} is of {entry.dtype}, which safetensors, and so a checkpoint, has not; expected one of "
                f"{', '.join(DTYPES.values())}"
            )


def files_of(
    entries: Iterable[SavedTensor], plan: Mapping[tuple[str, int], Sequence[Piece]]
) -> dict[str, dict[str, tuple[Region, Tensor]]]:
    """The files that this process writes: by the tensor's name, where a box lies in it, and its values."""
    files: dict[str, dict[str, tuple[Region, Tensor]]] = {}
    for entry in entries:
        for rank, kept in entry.parts.items():
            # Which kernels a rank has decides in which dtype an optimizer counts there.
            part = kept.to(getattr(torch, entry.dtype))
            for number, piece in enumerate(plan.get((entry.name, rank), ())):
                file = f"shard-{rank + 1:05d}-model-{number + 1:05d}{SUFFIX}"
                files.setdefault(file, {})[entry.name] = piece.whole, part[slices(piece.local)]
    return files
