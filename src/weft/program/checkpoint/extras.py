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
from torch import Tensor, nn

from weft.errors import DamagedCheckpoint, UserError, wrong
from weft.layout.layout import Region
from weft.ops.cost import dtype_name
from weft.program.agreement import gathered
from weft.program.checkpoint.files import SUFFIX, Reading, checksum, plain_values
from weft.program.checkpoint.manifest import DTYPES, Manifest
from weft.program.checkpoint.program_state import SavedTensor, read_by, read_like
from weft.program.checkpoint.values import from_json, to_json
from weft.runtime.world.world import World
from weft.tensor import GlobalTensor

EXTRA = "extra"
# Where a manifest keeps the extras that differ between processes: for each process, its own.
OWN = "extra of each process"
_log = logging.getLogger("weft")


@final
@dataclass(frozen=True)
class Extras:
    """The user's extras, as a checkpoint takes them.

    Attributes:
        about: the part that is not a tensor, as JSON; from the first process where it is the same on all.
        file: that this process writes.
        pieces: of its tensors, whole, by name: those that are the same on all are the first process's.
        shapes: shape and dtype of these tensors of all processes.
        laid: the global tensors, of which each process writes its ranks' part.
    """

    about: Mapping[str, Any]
    file: str
    pieces: Mapping[str, tuple[Region, Tensor]]
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    laid: Sequence[SavedTensor]


def extras_of(world: World, extra: Any) -> Extras:
    """The extras of all processes; entries that differ are kept for each. Every process must call it.

    Raises UserError on all, where one holds what no checkpoint takes, or where global tensors differ between processes.
    """
    states: dict[str, Any] = {}

    def tell() -> str:
        if not isinstance(extra, Mapping):
            raise wrong("extra", "a dict of what is to be saved by name", extra)
        states.update({name: state_of(each, f"{EXTRA}.{name}") for name, each in extra.items()})
        several = states.items() if world.several else ()
        return json.dumps({name: _sum(each, name) for name, each in several})

    every = list(map(json.loads, gathered(world, "the extras", tell)[:: len(world.ranks)]))
    for rank, own in enumerate(every):
        for name, found in own.items():
            others = [i for i, each in enumerate(every) if each.get(name) != found]
            if found[1] and others:
                raise UserError(
                    "extra: global tensors must be the same on all processes, and so must be all that is saved with "
                    f"them under one name: {name!r} has {found[1]} on rank {rank}, and is another on rank {others[0]}; "
                    "give each process the same extra"
                )
    differs = {n for own in every for n, found in own.items() if found != every[0].get(n)}
    process, alike, kept = world.ranks[0], dict[str, Tensor](), dict[str, Tensor]()
    shared = to_json({n: x for n, x in states.items() if str(n) not in differs}, EXTRA, alike)
    own = {n: x for n, x in states.items() if str(n) in differs}
    own = to_json(own, f"{EXTRA}/{process}", kept)
    plain, laid = _parted(alike)
    mine = (plain if process == 0 else {}) | kept
    about = {EXTRA: shared}
    shapes = {name: (tuple(x.shape), dtype_name(x.dtype)) for name, x in mine.items()}
    if differs:
        texts = gathered(world, "the extras of each", lambda: json.dumps([own, shapes]))
        about[OWN] = [json.loads(text)[0] for text in texts]
        shapes = {name: each for text in texts for name, each in json.loads(text)[1].items()}
        if process == 0:
            _tell_of(tuple(sorted(differs)), len(every))
    pieces = {name: (tuple((0, size) for size in x.shape), x) for name, x in mine.items()}
    return Extras(about, f"{EXTRA}-{process + 1:05d}{SUFFIX}", pieces, shapes, laid)


def _sum(state: Any, name: str) -> tuple[int, str]:
    """A checksum of an extra, and what is the same of its global tensors on all processes."""
    found: dict[str, Tensor] = {}
    text = json.dumps(to_json(state, f"{EXTRA}.{name}", found, 1), sort_keys=True)
    plain, laid = _parted(found)
    shapes = {name: (tuple(x.shape), dtype_name(x.dtype)) for name, x in found.items()}
    sums = list(map(checksum, plain_values(plain).values()))
    same = [[each.name, list(each.shape), each.dtype, str(each.layout)] for each in laid]
    return zlib.crc32(f"{text} {shapes} {sums}".encode()), json.dumps(same) if laid else ""


def _parted(found: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[SavedTensor]]:
    plain = {name: x for name, x in found.items() if not isinstance(x, GlobalTensor)}
    laid = [SavedTensor.of(n, n, x) for n, x in found.items() if isinstance(x, GlobalTensor)]
    return plain, laid


@cache
def _tell_of(names: tuple[str, ...], processes: int) -> None:
    """Say it once of each set of names, as a job may continue among fewer."""
    _log.warning(
        "the extras %s differ between processes: a checkpoint keeps those of each, and continues in %d processes alone",
        *(", ".join(names), processes),
    )


def state_of(value: Any, where: str) -> Any:
    """The part of an extra that is saved: its `state_dict()` where it has one; raises UserError where that fails."""
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


def read_extra(manifest: Manifest, objects: Mapping[str, Any], world: World) -> dict[str, Any]:
    """The user's extras of a checkpoint; `objects`, by name, are to load some of them.

    Tensors are whole, but for those in the place of an object's global tensor of the same shape: these get its layout.

    Raises:
        DamagedCheckpoint: it is none.
        UserError: it differs between processes, and there are more or fewer than those that saved it.
    """
    there: dict[str, Tensor] = {}
    for name, each in objects.items():
        with suppress(UserError):  # what cannot be saved now may still load
            to_json(state_of(each, f"{EXTRA}.{name}"), f"{EXTRA}.{name}", there)
    every = manifest.about.get(OWN, [{}] * world.size)
    if not isinstance(every, list) or not all(isinstance(own, dict) for own in every):
        raise DamagedCheckpoint(
            f"{manifest.folder}: its extras are not those of each process, as a checkpoint that is whole has them; "
            "load another checkpoint"
        )
    if OWN in manifest.about and len(every) != world.processes:
        names = ", ".join(sorted({name for own in every for name in own}))
        raise UserError(
            f"program.load: the extras {names} of {manifest.folder} differ between the {len(every)} processes that "
            f"saved them, and there are {world.processes} now: load it in {len(every)} processes, or the model alone "
            "(model_only=True). Extras that are equal on all processes can be loaded in any number"
        )
    tensors: dict[str, Tensor] = {}
    begins, plain = (f"{EXTRA}.", f"{EXTRA}/{world.ranks[0]}."), torch.empty(0)
    with torch.no_grad(), Reading(manifest.folder) as reading:
        for name, stored in manifest.tensors.items():
            if not name.startswith(begins):
                continue
            if stored.dtype not in DTYPES.values():
                raise DamagedCheckpoint(
                    f"{manifest.folder}: {name} is of no dtype {stored.dtype!r}"
                )
            like = there.get(name, plain)
            laid = isinstance(like, GlobalTensor) and tuple(like.shape) == stored.shape
            dtype, read = getattr(torch, stored.dtype), read_by(manifest, reading)
            tensors[name] = read_like(name, stored.shape, dtype, like if laid else plain, read)
    contents = manifest.about.get(EXTRA, {}), every[world.ranks[0]]
    shared, own = (from_json(each, EXTRA, tensors) for each in contents)
    if not isinstance(shared, dict) or not isinstance(own, dict):
        raise DamagedCheckpoint(
            f"{manifest.folder}: its entry extra is not a dict; load another checkpoint"
        )
    return {**shared, **own}


# The extra of a checkpoint under which it stands.
MODULES = "weft.modules"


def with_module_states(extra: Mapping[str, Any] | None, model: nn.Module) -> Mapping[str, Any]:
    """The user's extra, with what modules keep, by their names; raises UserError where one fails."""
    given = {} if extra is None else extra
    if not isinstance(given, Mapping):
        return given  # it is refused where it is saved
    if MODULES in given:
        raise UserError(
            f"what get_extra_state() of modules gives stands among the extras as {MODULES!r}; give yours another name"
        )
    found: dict[str, Any] = {}
    for name, module in _keeping(model).items():
        try:
            found[name] = module.get_extra_state()
        except Exception as error:
            raise UserError(
                f"get_extra_state() of {name or 'the model'}, a {type(module).__name__}, gives nothing to save: "
                f"{type(error).__name__}: {error}"
            ) from error
    return {**given, MODULES: found} if found else given


def put_module_states(extra: dict[str, Any], model: nn.Module) -> None:
    """Take out of the extras what modules keep, and give it to them."""
    saved = extra.pop(MODULES, {})
    for name, module in _keeping(model).items():
        if name in saved:
            try:
                module.set_extra_state(saved[name])
            except Exception as error:
                raise UserError(
                    f"program.load: set_extra_state() of {name or 'the model'}, a {type(module).__name__}, cannot "
                    f"load what was saved: {type(error).__name__}: {error}"
                ) from error


def _keeping(model: nn.Module) -> dict[str, nn.Module]:
    own = nn.Module.get_extra_state
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(type(module), "get_extra_state", own) is not own
    }
