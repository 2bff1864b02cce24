"""The user's own in a checkpoint: JSON, plain tensors, and global ones, of which ranks write and read their parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from weft.errors import DamagedCheckpoint, UserError
from weft.ops.dtypes import dtype_name
from weft.program.everyone import agreed, told
from weft.program.saving.files import Reading, slices
from weft.program.saving.manifest import DTYPES, Manifest, Stored
from weft.program.saving.pieces import pieces_of
from weft.program.saving.saved_tensors import SavedTensor
from weft.program.saving.values import from_json, to_json
from weft.runtime.world.world import World
from weft.tensor import GlobalTensor
from weft.tensor.spec import contiguous

EXTRA = "extra"


@final
@dataclass(frozen=True)
class Extras:
    """The user's own, as a checkpoint takes it.

    Attributes:
        content: as JSON; of the first process.
        plain: the tensors in it by name, which the first process writes.
        laid: the global ones, of which each process writes what falls to its ranks.
    """

    content: Any = field(default_factory=dict)
    plain: Mapping[str, Tensor] = field(default_factory=dict)
    laid: Sequence[SavedTensor] = ()

    @property
    def laid_text(self) -> str:
        """The global tensors, as text that is the same on all processes."""
        return json.dumps(
            [[each.name, list(each.shape), each.dtype, str(each.layout)] for each in self.laid]
        )


def extras_of(world: World, extra: Any) -> Extras:
    """The extras of the first process; global tensors in them must be the same on all. Every process must call it.

    Raises:
        UserError: on all processes: it holds what no checkpoint takes, or other global tensors on another process.
    """
    first = 0 in world.ranks
    found: list[Extras] = []

    def tell() -> str:
        found.append(_parts_of(extra) if first else Extras())
        return found[0].laid_text

    laid = told(world, "the extras", tell)[0]
    if laid == Extras().laid_text:
        return found[0]

    def same() -> Extras:
        own = found[0] if first else _parts_of(extra)
        if own.laid_text != laid:
            raise UserError(
                f"extra: global tensors must be the same on all processes; the first one gives {laid}, this one "
                f"{own.laid_text}: give each process the same extra"
            )
        return own

    return agreed(world, "the global tensors of the extras", same)


def _parts_of(extra: Any) -> Extras:
    if not isinstance(extra, Mapping):
        raise UserError(
            f"extra takes a dict of what is to be saved by name, found a {type(extra).__name__}"
        )
    found: dict[str, Tensor] = {}
    own = {name: state_of(each, f"{EXTRA}.{name}") for name, each in extra.items()}
    content = to_json(own, EXTRA, found)
    plain = {name: each for name, each in found.items() if not isinstance(each, GlobalTensor)}
    laid = [_entry(n, x) for n, x in found.items() if isinstance(x, GlobalTensor)]
    return Extras(content, plain, laid)


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


def read_extra(manifest: Manifest, objects: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own of a checkpoint.

    Tensors in it are whole, but for those that stand where an object that is given has a global tensor of the same
    shape: of these ranks read their parts, in its layout.

    Args:
        manifest: of the checkpoint.
        objects: that are to load it, by name.

    Raises:
        DamagedCheckpoint: it is none.
    """
    there = _laid_in(objects)
    stored = {name: x for name, x in manifest.tensors.items() if name.startswith(f"{EXTRA}.")}
    tensors: dict[str, Tensor] = {}
    with torch.no_grad(), Reading(manifest.folder) as reading:
        for name, each in stored.items():
            if each.dtype not in DTYPES.values():
                raise DamagedCheckpoint(f"{manifest.folder}: {name} is of no dtype {each.dtype!r}")
            model = there.get(name)
            if model is not None and model.spec.shape == each.shape:
                tensors[name] = _read_parts(reading, each, model)
            else:
                tensors[name] = torch.empty(each.shape, dtype=getattr(torch, each.dtype))
                whole = tuple((0, size) for size in each.shape)
                reading.piece(each.extents, whole, tensors[name])
    found = from_json(manifest.about.get(EXTRA, {}), EXTRA, tensors)
    if not isinstance(found, dict):
        raise DamagedCheckpoint(f"{manifest.folder}: its extra is no dict; load another checkpoint")
    return found


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
