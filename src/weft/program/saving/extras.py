"""The user's own in a checkpoint: JSON, plain tensors, and global ones, of which ranks write and read their parts."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from weft.errors import DamagedCheckpoint, UserError, wrong
from weft.layout.layout import Region
from weft.ops.cost import dtype_name
from weft.program.agreement import gathered
from weft.program.saving.files import SUFFIX, Reading, checksum, plain_values, slices
from weft.program.saving.manifest import DTYPES, Manifest, Stored
from weft.program.saving.saved_tensors import SavedTensor, pieces_of
from weft.program.saving.values import from_json, to_json
from weft.runtime.world.world import World
from weft.tensor import GlobalTensor
from weft.tensor.spec import contiguous

EXTRA = "extra"
# Where those stand in a manifest that differ between processes: for each process, its own.
OWN = "extra of each process"
_log = logging.getLogger("weft")


@final
@dataclass(frozen=True)
class Extras:
    """The user's own, as a checkpoint takes it.

    Attributes:
        about: the part that is no tensor, as JSON; of the first process what is the same on all.
        file: that this process writes.
        pieces: where each of its tensors lies, whole, and its values, by name: in the first process those that are the
            same on all, and in each its own.
        shapes: shape and dtype of the tensors that all processes write so.
        laid: the global ones, of which each process writes what falls to its ranks.
    """

    about: Mapping[str, Any]
    file: str
    pieces: Mapping[str, tuple[Region, Tensor]]
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    laid: Sequence[SavedTensor]


def extras_of(world: World, extra: Any) -> Extras:
    """The extras of all processes. Every process must call it.

    What a process does not give is that of the first one; what differs is kept for each.

    Raises:
        UserError: on all processes: it holds what no checkpoint takes, or other global tensors on another process.
    """
    states: dict[str, Any] = {}
    several = world.several

    def tell() -> str:
        if not isinstance(extra, Mapping):
            raise wrong("extra", "a dict of what is to be saved by name", extra)
        states.update({name: state_of(each, f"{EXTRA}.{name}") for name, each in extra.items()})
        return json.dumps({name: _sum(each, name) for name, each in states.items() if several})

    every = list(map(json.loads, gathered(world, "the extras", tell)[:: len(world.ranks)]))
    _check_laid(every)
    differs = {n for own in every for n, found in own.items() if found != every[0].get(n)}
    process, found, kept = world.ranks[0], dict[str, Tensor](), dict[str, Tensor]()
    shared = to_json({n: x for n, x in states.items() if str(n) not in differs}, EXTRA, found)
    own = to_json({n: x for n, x in states.items() if str(n) in differs}, _own(process), kept)
    plain, laid = _parted(found)
    mine = (plain if process == 0 else {}) | kept
    about, shapes = {EXTRA: shared}, _shapes(mine)
    if differs:
        texts = gathered(world, "the extras of each", lambda: json.dumps([own, shapes]))
        about[OWN] = [json.loads(text)[0] for text in texts]
        shapes = {name: each for text in texts for name, each in json.loads(text)[1].items()}
        if process == 0:
            _tell_of(tuple(sorted(differs)), len(every))
    pieces = {name: (tuple((0, size) for size in x.shape), x) for name, x in mine.items()}
    return Extras(about, extra_file(process), pieces, shapes, laid)


def _check_laid(every: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """Check that all processes give the same extras of those that hold global tensors, of which each writes a part."""
    for rank, own in enumerate(every):
        for name, found in own.items():
            others = [i for i, each in enumerate(every) if each.get(name) != found]
            if found[1] and others:
                raise UserError(
                    "extra: global tensors must be the same on all processes, and so must be all that is saved with "
                    f"them under one name: {name!r} has {found[1]} on rank {rank}, and is another on rank {others[0]}; "
                    "give each process the same extra"
                )


def extra_file(process: int) -> str:
    """The file of the tensors that a process writes of the user's own."""
    return f"{EXTRA}-{process + 1:05d}{SUFFIX}"


@cache
def _tell_of(names: tuple[str, ...], processes: int) -> None:
    """Say it once of each set of names, as a job may go on among fewer."""
    _log.warning(
        "the extras %s differ between processes: a checkpoint keeps those of each, and goes on in %d processes alone",
        *(", ".join(names), processes),
    )


def _own(process: int) -> str:
    """The begin of the names of what a process has by itself."""
    return f"{EXTRA}/{process}"


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(x.shape), dtype_name(x.dtype)) for name, x in tensors.items()}


def _sum(state: Any, name: str) -> tuple[int, str]:
    """A checksum of an extra, and what is the same of its global tensors on all processes."""
    found: dict[str, Tensor] = {}
    text = json.dumps(to_json(state, f"{EXTRA}.{name}", found, 1), sort_keys=True)
    plain, laid = _parted(found)
    sums = list(map(checksum, plain_values(plain).values()))
    same = [[each.name, list(each.shape), each.dtype, str(each.layout)] for each in laid]
    return zlib.crc32(f"{text} {_shapes(found)} {sums}".encode()), json.dumps(same) if laid else ""


def _parted(found: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[SavedTensor]]:
    """Plain tensors, and the global ones."""
    plain = {name: x for name, x in found.items() if not isinstance(x, GlobalTensor)}
    return plain, [_entry(n, x) for n, x in found.items() if isinstance(x, GlobalTensor)]


def _entry(name: str, tensor: GlobalTensor) -> SavedTensor:
    """A global tensor as what is saved of it; in the shares in which its parts lie."""
    spec = tensor.spec
    parts = {rank: part.detach() for rank, part in zip(spec.mesh.ranks, tensor.locals, strict=True)}
    about = name, name, spec.shape, dtype_name(spec.dtype), spec.layout
    return SavedTensor(*about, tensor.shares, parts)


def state_of(value: Any, where: str) -> Any:
    """The part of an extra that is saved: its `state_dict()` where it has one.

    Raises:
        UserError: `state_dict()` fails.
    """
    if isinstance(value, type) or not (
        hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    ):
        return value
    try:
        return value.state_dict()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{where}, a {type(value).__name__}, gives no state_dict(): {type(error).__name__}: {error}; give an "
            "object that has one, or the values themselves"
        ) from error


def stored_extras(manifest: Manifest, world: World) -> dict[str, Stored]:
    """The tensors of the user's own that this process reads."""
    begins = f"{EXTRA}.", f"{_own(world.ranks[0])}."
    return {name: each for name, each in manifest.tensors.items() if name.startswith(begins)}


def read_extra(manifest: Manifest, objects: Mapping[str, Any], world: World) -> dict[str, Any]:
    """The user's own of a checkpoint.

    Tensors in it are whole, but for those that stand where an object that is given has a global tensor of the same
    shape: of these ranks read their parts, in its layout.

    Args:
        objects: that are to load it, by name.

    Raises:
        DamagedCheckpoint: it is none.
        UserError: it is not the same on all processes, and there are more or fewer than those that saved it.
    """
    there = _laid_in(objects)
    contents = manifest.about.get(EXTRA, {}), _own_content(manifest, world)
    tensors: dict[str, Tensor] = {}
    with torch.no_grad(), Reading(manifest.folder) as reading:
        for name, each in stored_extras(manifest, world).items():
            if each.dtype not in DTYPES.values():
                raise DamagedCheckpoint(f"{manifest.folder}: {name} is of no dtype {each.dtype!r}")
            model = there.get(name)
            if model is not None and model.spec.shape == each.shape:
                tensors[name] = _read_parts(reading, each, model)
            else:
                tensors[name] = torch.empty(each.shape, dtype=getattr(torch, each.dtype))
                whole = tuple((0, size) for size in each.shape)
                reading.piece(each.extents, whole, tensors[name])
    shared, own = (from_json(each, EXTRA, tensors) for each in contents)
    if not isinstance(shared, dict) or not isinstance(own, dict):
        raise DamagedCheckpoint(f"{manifest.folder}: its extra is no dict; load another checkpoint")
    return {**shared, **own}


def _own_content(manifest: Manifest, world: World) -> Any:
    """The user's own that this process has by itself, as JSON."""
    every, now = manifest.about.get(OWN), world.processes
    if every is None:
        return {}
    if not isinstance(every, list) or not all(isinstance(own, dict) for own in every):
        raise DamagedCheckpoint(
            f"{manifest.folder}: its extras are none of each process; load another checkpoint"
        )
    if len(every) != now:
        names = ", ".join(sorted({name for own in every for name in own}))
        raise UserError(
            f"program.load: the extras {names} of {manifest.folder} are others in each of the {len(every)} processes "
            f"that saved them, and there are {now} now: load it in {len(every)}, or the model alone (model_only=True). "
            "What all processes save alike goes on in any number"
        )
    return every[world.ranks[0]]


def _laid_in(objects: Mapping[str, Any]) -> dict[str, GlobalTensor]:
    """The global tensors that objects hold now, under the names that they have in a checkpoint."""
    found: dict[str, Tensor] = {}
    for name, each in objects.items():
        with suppress(UserError):  # what cannot be saved now may still load
            to_json(state_of(each, f"{EXTRA}.{name}"), f"{EXTRA}.{name}", found)
    return {name: each for name, each in found.items() if isinstance(each, GlobalTensor)}


def _read_parts(reading: Reading, stored: Stored, like: GlobalTensor) -> GlobalTensor:
    """A tensor of a checkpoint, in the layout of another one."""
    spec, dtype = like.spec, getattr(torch, stored.dtype)
    parts = []
    for rank, own in zip(spec.mesh.ranks, like.locals, strict=True):
        shape = spec.layout.local_shape(spec.shape, rank)
        part = torch.empty(shape, dtype=dtype, device=own.device)
        for piece in pieces_of(spec.shape, spec.layout, None, rank):
            reading.piece(stored.extents, piece.whole, part[slices(piece.local)])
        parts.append(part)
    return GlobalTensor(contiguous(spec.mesh, spec.layout, spec.shape, dtype), tuple(parts))
