"""Load a program from a checkpoint, written in any layout: each rank reads what it holds, and no more."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.capture.optimizer_groups import Optimizers
from weft.capture.optimizers.attributes import is_foreign
from weft.errors import DamagedCheckpoint, UserError
from weft.program.agreement import gathered, run_on_all
from weft.program.live.optimizer_state import agree
from weft.program.live.variables import state_dict_names
from weft.program.saving.extras import read_extra
from weft.program.saving.files import Reading, check_extents, slices
from weft.program.saving.groups import check_program, options_of, put_options
from weft.program.saving.manifest import Manifest, Stored, read_manifest
from weft.program.saving.program_state import (
    BUFFERS,
    MASTERS,
    MODEL,
    STATE,
    IdleParameter,
    ProgramState,
    idle_state,
)
from weft.program.saving.saved_tensors import Piece, SavedTensor
from weft.program.saving.values import from_json
from weft.program.saving.weights import Weights, renamed_in
from weft.units import ITEM_SIZE

_log = logging.getLogger("weft")

# Names that are missing or unknown, in an error.
_NAMED = 5


@final
@dataclass(frozen=True)
class Loaded:
    """The part of a checkpoint that is no tensor.

    Attributes:
        about: the program that was saved; empty where another program wrote the files.
    """

    about: Mapping[str, Any]
    extra: Mapping[str, Any]


def load(
    state: ProgramState,
    weights: Weights,
    optimizers: Optimizers,
    objects: Mapping[str, Any],
    model_only: bool = False,
) -> Loaded:
    """Read a checkpoint into a program. Every process must call it.

    Nothing is written before all names and shapes fit, all files are whole, and the user's objects have what is theirs.

    Args:
        weights: the folder, and the names of its tensors here.
        optimizers: whose options are loaded.
        objects: get what was saved of an extra of their name, by `load_state_dict`.
        model_only: leaves optimizers, steps and extras as they are.

    Raises:
        UserError: on all processes: there is no checkpoint, it is damaged, or it is of another model.
    """
    world, path = state.setting.world, Path(weights.path)
    entries = list(state.variables())
    manifest = run_on_all(
        world,
        "the checkpoint",
        lambda: _named(renamed_in(read_manifest(path), weights.names), entries),
    )
    manifest = of_model(manifest) if model_only else manifest
    sums = gathered(world, "which checkpoint", lambda: str(zlib.crc32(manifest.to_text().encode())))
    if len(set(sums)) > 1:
        raise UserError(
            f"the processes see different checkpoints at {path}; give a path on a file system that all share"
        )
    sources = run_on_all(
        world, "what fits", lambda: _sources(state, manifest, entries, weights.strict)
    )
    run_on_all(world, "the program", lambda: check_program(manifest.about, state, optimizers))
    groups = run_on_all(world, "the groups", lambda: options_of(manifest.about, optimizers))
    kept = run_on_all(world, "what fits of the optimizers", lambda: _kept(state, manifest))
    numbers = run_on_all(world, "the numbers", lambda: _numbers(manifest))
    run_on_all(
        world,
        "the files",
        lambda: _check_files(manifest, len(world.ranks), world.ranks[0], world.size),
    )
    extra = run_on_all(world, "the extra", lambda: read_extra(manifest, objects, world))
    run_on_all(world, "what is given", lambda: _give(objects, extra, path))

    def read() -> None:
        with torch.no_grad(), Reading(manifest.folder) as reading:
            reader = _PieceReader(manifest, reading)
            for entry in entries:
                if (source := sources[entry.name]) is not None:
                    for rank, part in entry.parts.items():
                        reader.read(source, entry.pieces(rank), part)
            _read_waiting(state, reader)
            # Files of a model alone say nothing of states, which stay.
            if manifest.about or any(kept.values()):
                _read_states(state, reader, kept, numbers)
        put_options(groups, optimizers)

    run_on_all(world, "the values", read)
    agree(optimizers.each)
    return Loaded(manifest.about, extra)


def _give(objects: Mapping[str, Any], extra: Mapping[str, Any], path: Path) -> None:
    """Let the user's objects load what was saved of them."""
    lacking = [name for name in objects if name not in extra]
    if lacking:
        raise UserError(f"program.load: {path} has no extra {lacking[0]!r}; it has {sorted(extra)}")
    for name, each in objects.items():
        if not hasattr(each, "load_state_dict"):
            raise UserError(
                f"program.load: extra gives {name!r} a {type(each).__name__}; it takes objects with load_state_dict. "
                "What is no such object stands in the dict that load returns"
            )
        try:
            each.load_state_dict(extra[name])
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"program.load: the extra {name!r}, a {type(each).__name__}, cannot load what {path} has of it: "
                f"{type(error).__name__}: {error}"
            ) from error


def _named(manifest: Manifest, entries: Sequence[SavedTensor]) -> Manifest:
    """The manifest, with tensors of files that others wrote under the names that they have here.

    A model alone may stand under the plain names of its `state_dict()`.
    """
    names = {entry.name for entry in entries if entry.name.startswith(MODEL)}
    if manifest.about or any(name in manifest.tensors for name in names):
        return manifest
    return replace(
        manifest, tensors={MODEL + name: each for name, each in manifest.tensors.items()}
    )


def of_model(manifest: Manifest) -> Manifest:
    """Parameters, buffers and masters of a checkpoint alone."""
    kept = {n: x for n, x in manifest.tensors.items() if n.startswith((MODEL, BUFFERS, MASTERS))}
    return Manifest(manifest.folder, kept)


def weights_in(weights: Weights, model: nn.Module) -> frozenset[str]:
    """The names of those tensors of a model for which a checkpoint, or files of safetensors, have values.

    Raises:
        UserError: there is none, or it is damaged.
    """
    names = state_dict_names(model)
    stored = renamed_in(read_manifest(Path(weights.path)), weights.names).tensors
    plain = not any(MODEL + name in stored for name in names)
    return frozenset(
        key for name, key in names.items() if (name if plain else MODEL + name) in stored
    )


def _sources(
    state: ProgramState, manifest: Manifest, entries: Sequence[SavedTensor], strict: bool
) -> dict[str, str | None]:
    """The tensor of the checkpoint from which each entry is read; None where it keeps what it has."""
    stored = manifest.tensors
    names = {entry.name for entry in entries}
    # Of tied parameters, files of others hold one.
    models = [entry for entry in entries if entry.name.startswith(MODEL)]
    there = {entry.key: entry.name for entry in models if entry.name in stored}
    missing = sorted(x.name.removeprefix(MODEL) for x in models if x.key not in there)
    ours = (n for n in stored if n.startswith(MODEL) and n not in names)
    unknown = sorted(name.removeprefix(MODEL) for name in ours)
    if (missing or unknown) and (strict or not there):
        raise UserError(
            f"{manifest.folder} is of another model: it lacks {_few(missing)}, and has {_few(unknown)} which the model "
            f"has not; {_way(missing, unknown, state.setting.model)}"
        )
    if (missing or unknown) and 0 in state.setting.world.ranks:
        text = "%s lacks %s, which stay as they are, and has %s, which the model has not"
        _log.warning(text, manifest.folder, missing, unknown)
    sources = {entry.name: _source(entry, stored, there) for entry in entries}
    for entry in entries:
        source = sources[entry.name]
        if source is not None and stored[source].shape != entry.shape:
            raise UserError(
                f"{entry.name} has shape {list(entry.shape)} in the program, {list(stored[source].shape)} in "
                f"{manifest.folder}; load it into the model that was saved"
            )
        if source is not None and _is_complex(stored[source].dtype) > _is_complex(entry.dtype):
            raise UserError(
                f"{entry.name} is of {entry.dtype} in the program, and of {stored[source].dtype} in "
                f"{manifest.folder}; load it into the model that was saved, or into one of complex numbers"
            )
    return sources


def _way(missing: Sequence[str], unknown: Sequence[str], model: nn.Module) -> str:
    """The way to load files whose names are not all those of a model."""
    if hasattr(model, "save_pretrained") and any("experts" in name for name in missing):
        return (
            "transformers writes experts one by one, and holds them together: write files of what the model holds, "
            "from_pretrained(…).save_pretrained(folder, save_original_format=False), and load these"
        )
    here, there = set(missing), set(unknown)
    forms = (here, there, '{"^": "%s."}'), (there, here, r'{r"^%s\.": ""}')
    guesses = [
        (sum(f"{prefix}.{name}" in one for name in other), form % prefix)
        for one, other, form in forms
        for prefix in {name.partition(".")[0] for name in one}
    ]
    fitting, names = max(guesses)
    names = names if fitting else '{"pattern": "replacement"}'
    return (
        f"load it into the model that was saved; or give weft.Weights(folder, names={names}) for other names, with "
        "strict=False to take what is there"
    )


def _source(
    entry: SavedTensor, stored: Mapping[str, Stored], there: Mapping[str, str]
) -> str | None:
    """The tensor that an entry is read from; `there` are the names of parameters and buffers by their keys."""
    if entry.name.startswith(MASTERS):
        key = entry.name.removeprefix(MASTERS)
        return entry.name if entry.name in stored else there.get(key)
    if entry.name.startswith(MODEL) and entry.key in there:
        # What is wider here than it was saved goes on from its master.
        master = MASTERS + entry.key
        own = there[entry.key]
        wide = _size(entry.dtype) > _size(stored[own].dtype)
        return master if wide and master in stored else own
    return entry.name if entry.name in stored else None


def _is_complex(dtype: str) -> bool:
    return dtype.startswith("complex")


def _size(dtype: str) -> int:
    return ITEM_SIZE.get(dtype, 8)


def _kept(state: ProgramState, manifest: Manifest) -> dict[str, list[str]]:
    """For each parameter of the optimizers, the names of the states that the checkpoint has as tensors."""
    idle = state.idle()
    found = _by_parameter(manifest, {key for key, _, _ in state.stated()} | idle.keys())
    known: dict[str, list[str]] = {}
    every = state.training.states if state.training is not None else ()
    foreign = {x.key for each in every if is_foreign(each.optimizer) for x in each.members}
    for key, states, _ in state.stated():
        saved = found.get(key, [])
        # What others than torch's own keep may come with a later step.
        lacking = set() if key in foreign else set(states) - set(saved)
        if saved and (lacking or set(saved) - set(states)):
            raise UserError(
                f"{manifest.folder} has the states {_few(sorted(saved))} of {key}, the program's update keeps "
                f"{_few(sorted(states))}; load it with the optimizer that was saved, with the same options"
            )
        for entry in saved:
            shape, stored = states[entry].shape, manifest.tensors[f"{STATE}{key}.{entry}"].shape
            if shape != stored:
                raise UserError(
                    f"{STATE}{key}.{entry} has shape {list(shape)} in the program, {list(stored)} in "
                    f"{manifest.folder}; load it with the optimizer that was saved"
                )
        known[key] = saved
    return known | {key: found.get(key, []) for key in idle}


def _by_parameter(manifest: Manifest, keys: Collection[str]) -> dict[str, list[str]]:
    """The names of the states that a checkpoint has, by those parameters that are known; both may have dots."""
    found: dict[str, list[str]] = {}
    for name in manifest.tensors:
        if name.startswith(STATE):
            words = name.removeprefix(STATE).split(".")
            for length in range(1, len(words)):
                key = ".".join(words[:length])
                if key in keys:
                    found.setdefault(key, []).append(".".join(words[length:]))
    return found


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "nothing") + more


def _check_files(manifest: Manifest, own: int, first: int, ranks: int) -> None:
    """Check the files that fall to this process: all of them are checked once."""
    stored = manifest.tensors.values()
    extents = [(extent, each.dtype) for each in stored for extent in each.extents]
    mine = (x for number, x in enumerate(extents) if first <= number % ranks < first + own)
    check_extents(manifest.folder, mine)


@final
class _PieceReader:
    """Reads what ranks hold."""

    def __init__(self, manifest: Manifest, reading: Reading) -> None:
        self.manifest = manifest
        self._reading = reading

    def read(self, source: str, pieces: Sequence[Piece], part: Tensor) -> None:
        """Read pieces of a tensor into the part of a rank."""
        extents = self.manifest.tensors[source].extents
        for piece in pieces:
            self._reading.piece(extents, piece.whole, part[slices(piece.local)])


def _numbers(manifest: Manifest) -> Mapping[str, Mapping[str, Any]]:
    """The states of optimizers that are no tensors, by parameter."""
    found = from_json(manifest.about.get("numbers", {}), "numbers", {})
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise DamagedCheckpoint(
            f"{manifest.folder}: its numbers are none by parameter; load another checkpoint"
        )
    return found


def _read_states(
    state: ProgramState,
    reader: _PieceReader,
    kept: Mapping[str, Sequence[str]],
    numbers: Mapping[str, Mapping[str, Any]],
) -> None:
    """Let the ranks keep the states that were saved, and let go of others."""
    values: dict[str, dict[int, dict[str, Any]]] = {}
    variables = state.setting.variables
    for key, entry, rank in _stated(state, kept):
        part = torch.empty(
            entry.layout.local_shape(entry.shape, rank),
            dtype=getattr(torch, entry.dtype),
            device=variables[rank][key].device,
        )
        reader.read(entry.name, entry.pieces(rank), part)
        values.setdefault(key, {}).setdefault(rank, {})[entry.key] = part
    for key, _, _ in state.stated():
        for rank, own in variables.items() if key in numbers else ():
            if key in own:
                values.setdefault(key, {}).setdefault(rank, {}).update(numbers[key])
    for each in state.training.states if state.training is not None else ():
        each.put(values)
    for key, parameter in state.idle().items():
        _read_idle(key, parameter, reader, kept.get(key, ()), numbers.get(key, {}))


def _waiting(
    state: ProgramState, manifest: Manifest, key: str, parameter: IdleParameter
) -> list[str]:
    """The name of the master that a checkpoint has for a parameter that no plan updates so far, where there are any."""
    precision = state.setting.options.precision
    narrow = parameter.tensor.dtype in (torch.bfloat16, torch.float16)
    stored = manifest.tensors.get(MASTERS + key)
    wanted = precision is not None and precision.masters and narrow and stored is not None
    fits = stored is not None and stored.shape == tuple(parameter.tensor.shape)
    return [MASTERS + key] if wanted and fits else []


def _read_waiting(state: ProgramState, reader: _PieceReader) -> None:
    """Keep the masters that were saved of parameters that no plan updates so far."""
    if state.training is None:
        return
    found = {}
    for key, parameter in state.idle().items():
        for name in _waiting(state, reader.manifest, key, parameter):
            shape, tensor = tuple(parameter.tensor.shape), parameter.tensor
            found[key] = tensor, idle_state(name, shape, torch.float32, tensor, reader.read)
    state.training.masters.wait(found)


def _read_idle(
    key: str,
    parameter: IdleParameter,
    reader: _PieceReader,
    names: Sequence[str],
    numbers: Mapping[str, Any],
) -> None:
    """Let an optimizer hold what was saved of a parameter that no plan updates so far; it may be nothing."""
    held: dict[str, Any] = {}
    for name in names:
        own = f"{STATE}{key}.{name}"
        stored = reader.manifest.tensors[own]
        dtype: torch.dtype = getattr(torch, stored.dtype)
        held[name] = idle_state(own, stored.shape, dtype, parameter.tensor, reader.read)
    parameter.optimizer.state.pop(parameter.tensor, None)
    if held or numbers:
        parameter.optimizer.state[parameter.tensor] = {**held, **numbers}


def _stated(
    state: ProgramState, kept: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, SavedTensor, int]]:
    """Each state that is a tensor: its parameter, its entry, and a rank of this process that keeps a part of it."""
    for key, states, shares in state.stated():
        for name in kept.get(key, ()):
            value = states[name]
            assert value.layout is not None  # all values of a compiled graph have one
            about = f"{STATE}{key}.{name}", name, value.shape, value.dtype, value.layout
            entry = SavedTensor(*about, shares.get(name), {})
            for rank, variables in state.setting.variables.items():
                if rank in value.layout.placement.coordinates and key in variables:
                    yield key, entry, rank
