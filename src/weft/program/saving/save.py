"""Save a program: every process writes its ranks' pieces, and the first puts the checkpoint in its place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.errors import UserError
from weft.layout.region import Region
from weft.program.everyone import agreed, told
from weft.program.saving.files import SUFFIX, Extent, slices, write_file
from weft.program.saving.manifest import (
    Manifest,
    Stored,
    abandon,
    begin,
    partial_folder,
    publish,
)
from weft.program.saving.program_state import ProgramState
from weft.program.saving.saved_tensors import SavedTensor, writers
from weft.program.saving.values import to_json
from weft.tensor import GlobalTensor

EXTRA = "extra"


def save(
    state: ProgramState, path: Path, about: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    """Write a checkpoint. Every process must call it.

    Args:
        state: of the program.
        path: a folder that is not there yet, on a file system that all processes see.
        about: the program, as `to_json` takes it.
        extra: the user's own.

    Raises:
        UserError: on all processes, when one cannot write; nothing is at `path` then.
    """
    world = state.setting.world
    first = 0 in world.ranks
    agreed(world, "the folder", lambda: begin(path) if first else None)
    try:
        kept, numbers = state.kept()
        entries = [*state.variables(), *state.states(kept)]
        written = told(world, "the files", lambda: json.dumps(_written(state, entries, path)))
        parts = [each for text in dict.fromkeys(written) for each in json.loads(text)]

        def put() -> None:
            if first:
                tensors = _stored(entries, parts)
                rest = _extra(extra, partial_folder(path), tensors)
                publish(path, Manifest(path, tensors, {**about, "numbers": numbers, EXTRA: rest}))

        agreed(world, "the checkpoint", put)
    except BaseException:
        if first:
            abandon(path)
        raise


def _written(state: ProgramState, entries: Sequence[SavedTensor], path: Path) -> list[Any]:
    """Write the files of the ranks of this process; name, file, box and checksum of each piece."""
    todo: dict[str, dict[str, tuple[Region, Tensor]]] = {}
    plan = writers(entries)
    for entry in entries:
        for rank, part in entry.parts.items():
            pieces = plan.get((entry.name, rank), ())
            for number, piece in enumerate(pieces):
                file = f"shard-{rank + 1:05d}-model-{number + 1:05d}{SUFFIX}"
                todo.setdefault(file, {})[entry.name] = piece.whole, part[slices(piece.local)]
    found = []
    for file, each in todo.items():
        sums = write_file(partial_folder(path), file, each)
        found += [[name, file, whole, sums[name]] for name, (whole, _) in each.items()]
    return found


def _stored(entries: Sequence[SavedTensor], parts: Sequence[Any]) -> dict[str, Stored]:
    extents: dict[str, list[Extent]] = {}
    for name, file, whole, checksum in parts:
        region = tuple((at, length) for at, length in whole)
        extents.setdefault(name, []).append(Extent(file, name, region, checksum))
    return {
        each.name: Stored(each.shape, each.dtype, tuple(extents.get(each.name, ())))
        for each in entries
    }


def _extra(extra: Mapping[str, Any], folder: Path, tensors: dict[str, Stored]) -> Any:
    """The user's own as JSON; tensors in it go into a file, and among `tensors`."""
    found: dict[str, Tensor] = {}
    content = {
        name: to_json(state_of(each), f"{EXTRA}.{name}", found) for name, each in extra.items()
    }
    for name, tensor in found.items():
        if isinstance(tensor, GlobalTensor):
            raise UserError(
                f"{name} is a global tensor; a checkpoint takes extra tensors that are whole: give {name}.full()"
            )
    boxes = {name: (tuple((0, size) for size in x.shape), x) for name, x in found.items()}
    if boxes:
        file = f"{EXTRA}{SUFFIX}"
        sums = write_file(folder, file, boxes)
        for name, (whole, tensor) in boxes.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[name] = Stored(
                tuple(tensor.shape), dtype, (Extent(file, name, whole, sums[name]),)
            )
    return content


def state_of(value: Any) -> Any:
    """The part of an extra that is saved: its `state_dict()` where it has one."""
    stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return value.state_dict() if stateful else value
