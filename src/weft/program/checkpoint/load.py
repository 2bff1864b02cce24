"""Load a program from a checkpoint, written in any layout, or from files of weights: each rank reads what it holds."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from weft.capture.optimizer_groups import Optimizers
from weft.capture.optimizers.attributes import is_foreign
from weft.errors import DamagedCheckpoint, UserError, wrong
from weft.program.agreement import gather_beside, run_on_all
from weft.program.checkpoint.extras import read_extra
from weft.program.checkpoint.files import Reading, check_extents
from weft.program.checkpoint.manifest import Manifest, Stored, checkpoint_path, read_manifest
from weft.program.checkpoint.program_state import (
    BUFFERS,
    MASTERS,
    MODEL,
    STATE,
    ProgramState,
    Read,
    SavedTensor,
    pieces_of,
    read_by,
    read_like,
)
from weft.program.checkpoint.values import check_program, from_json, options_of, put_options
from weft.program.live.updated import agree
from weft.program.live.variables import state_dict_names
from weft.units import ITEM_SIZE

_log = logging.getLogger("weft")
# Names that are missing or unknown, in an error.
_NAMED = 5


@final
@dataclass(frozen=True)
class Weights:
    r"""Files with values of a model's parameters and buffers, for `weights=` of `weft.compile` and `Program.load`.

    Args:
        path: a checkpoint, or a folder of safetensors files.
        names: regular expressions with what takes the place of their matches in the names of the files, one after
            the other, as `key_mapping` of transformers has them: `{"^": "transformer."}` for a model around the one
            whose files these are, `{r"LayerNorm\.gamma$": "LayerNorm.weight"}`.
        strict: as in `load_state_dict`; False takes what there is, and the log "weft" says what was missing, which
            keeps its values, and unexpected. Other shapes are refused all the same.

    Raises:
        UserError: an argument is of another kind, or no regular expression.
    """

    path: str | Path
    names: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.strict, bool):
            raise wrong("weft.Weights: strict", "True or False", self.strict)
        given = self.names if isinstance(self.names, Mapping) else {None: None}
        if not all(isinstance(each, str) for each in (*given, *given.values())):
            expected = (
                "a dict of regular expressions and what takes the place of their matches, such as "
                '{"^": "transformer."}'
            )
            raise wrong("weft.Weights: names", expected, self.names)
        renamed("", self.names)


def renamed_in(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    """The tensors of files under the names of the model, as `Weights` has them."""
    if not names:
        return manifest
    tensors: dict[str, Stored] = {}
    for name, stored in manifest.tensors.items():
        kinds = (MODEL, BUFFERS, MASTERS) if manifest.about else ()
        kind = next((kind for kind in kinds if name.startswith(kind)), "")
        new = kind + renamed(name.removeprefix(kind), names)
        if new in tensors:
            raise UserError(
                f"names={dict(names)} make {new} of two tensors in {manifest.folder}, {name} is one of them; "
                "use patterns that keep them apart"
            )
        tensors[new] = stored
    return Manifest(manifest.folder, tensors, manifest.about)


def located(weights: str | Path | Weights) -> tuple[Weights, Path]:
    """Weights whose path is that of a checkpoint from the root, and this path."""
    given = weights if isinstance(weights, Weights) else Weights(weights)
    place = checkpoint_path(given.path)
    return replace(given, path=place), place


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A name with the matches of each regular expression replaced; raises UserError where one is none."""
    for pattern, text in names.items():
        try:
            name = re.sub(pattern, text, name)
        except (re.error, IndexError) as error:
            raise UserError(
                f"names={{{pattern!r}: {text!r}}}: {error}; expected a regular expression of Python and what takes "
                "the place of its matches"
            ) from None
    return name


def weights_in(weights: Weights, model: nn.Module) -> frozenset[str]:
    """The names of those tensors of a model for which a checkpoint, or files of safetensors, have values."""
    names = state_dict_names(model)
    stored = renamed_in(read_manifest(Path(weights.path)), weights.names).tensors
    begin = MODEL if any(MODEL + name in stored for name in names) else ""
    return frozenset(key for name, key in names.items() if begin + name in stored)


def load(
    state: ProgramState,
    weights: Weights,
    optimizers: Optimizers,
    objects: Mapping[str, Any],
    model_only: bool = False,
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Read a checkpoint into a program. Every process must call it.

    Nothing is written before all names and shapes fit, all files are whole, and the user's objects have what is theirs.

    Args:
        objects: load what was saved of the extra of their name, by `load_state_dict`.
        model_only: leaves optimizers, steps and extras as they are.

    Returns:
        What the checkpoint says of the program (nothing where another program wrote the files), and its extras.

    Raises:
        UserError: on all processes: there is no checkpoint, it is damaged, or it is of another model.
    """
    world, path, entries = state.setting.world, Path(weights.path), list(state.variables())

    def find() -> tuple[Manifest, str]:
        found = renamed_in(read_manifest(path), weights.names)
        names = {entry.name for entry in entries if entry.name.startswith(MODEL)}
        if not found.about and names.isdisjoint(found.tensors):
            # A model alone may be under the plain names of its `state_dict()`.
            found = replace(found, tensors={MODEL + n: x for n, x in found.tensors.items()})
        if model_only:
            tensors, kinds = found.tensors, (MODEL, BUFFERS, MASTERS)
            found = Manifest(path, {n: x for n, x in tensors.items() if n.startswith(kinds)})
        return found, str(zlib.crc32(found.to_text().encode()))

    manifest, sums = gather_beside(world, "the checkpoint", find)
    if len(set(sums)) > 1:
        raise UserError(
            f"the processes see different checkpoints at {path}; give a path on a file system that all share"
        )

    def fit() -> tuple[_CheckpointReader, list[list[dict[str, Any]]], dict[str, Any]]:
        sources = _sources(state, manifest, entries, weights.strict)
        check_program(manifest.about, state.setting, state.graph, optimizers)
        groups = options_of(manifest.about, optimizers)
        numbers = from_json(manifest.about.get("numbers", {}), "numbers", {})
        named = isinstance(numbers, dict) and all(isinstance(x, dict) for x in numbers.values())
        if not named:
            raise DamagedCheckpoint(
                f"{manifest.folder}: its entry numbers is not a dict by parameter; load another checkpoint"
            )
        reader = _CheckpointReader(state, manifest, sources, _kept(state, manifest), numbers)
        # Each process checks its part of the files.
        every = [(x, each.dtype) for each in manifest.tensors.values() for x in each.extents]
        mine = (x for number, x in enumerate(every) if number % world.size in world.ranks)
        check_extents(manifest.folder, mine)
        return reader, groups, read_extra(manifest, objects, world)

    reader, groups, extra = run_on_all(world, "what fits", fit)
    run_on_all(world, "what is given", lambda: _give(objects, extra, path))

    def read() -> None:
        with torch.no_grad(), Reading(manifest.folder) as reading:
            reader.read(entries, reading)
        put_options(groups, optimizers)

    run_on_all(world, "the values", read)
    agree(optimizers.each)
    return manifest.about, extra


def _give(objects: Mapping[str, Any], extra: Mapping[str, Any], path: Path) -> None:
    lacking = [name for name in objects if name not in extra]
    if lacking:
        raise UserError(f"program.load: {path} has no extra {lacking[0]!r}; it has {sorted(extra)}")
    for name, each in objects.items():
        if not hasattr(each, "load_state_dict"):
            raise UserError(
                f"program.load: extra gives {name!r} a {type(each).__name__}; it takes objects with load_state_dict. "
                "All other extras are in the dict that load returns"
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


def _sources(
    state: ProgramState, manifest: Manifest, entries: Sequence[SavedTensor], strict: bool
) -> dict[str, str | None]:
    """The tensor of the checkpoint from which each entry is read; None if it keeps what it has."""
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
            f"{manifest.folder} is of another model: it lacks {_few(missing)}, and has {_few(unknown)} which the "
            f"model does not have; {_way(missing, unknown, state.setting.model)}"
        )
    if (missing or unknown) and 0 in state.setting.world.ranks:
        text = "%s lacks %s, which keep their values, and has %s, which the model does not have"
        _log.warning(text, manifest.folder, missing, unknown)
    sources = {entry.name: _source(entry, stored, there) for entry in entries}
    for entry in entries:
        source = sources[entry.name]
        if source is not None and stored[source].shape != entry.shape:
            raise UserError(
                f"{entry.name} has shape {list(entry.shape)} in the program, {list(stored[source].shape)} in "
                f"{manifest.folder}; load it into the model that was saved"
            )
        if source is not None and stored[source].dtype.startswith(
            "complex"
        ) > entry.dtype.startswith("complex"):
            raise UserError(
                f"{entry.name} is of {entry.dtype} in the program, and of {stored[source].dtype} in "
                f"{manifest.folder}; load it into the model that was saved, or into a model of complex numbers"
            )
    return sources


def _way(missing: Sequence[str], unknown: Sequence[str], model: nn.Module) -> str:
    """The way to load files whose names are not all those of a model."""
    if hasattr(model, "save_pretrained") and any("experts" in name for name in missing):
        return (
            "transformers writes each expert separately, but keeps all in one parameter: write files of the model's "
            "own parameters, from_pretrained(…).save_pretrained(folder, save_original_format=False), and load these"
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
        # A parameter wider here than saved continues from its FP32 main parameter.
        master = MASTERS + entry.key
        own = there[entry.key]
        wide = _size(entry.dtype) > _size(stored[own].dtype)
        return master if wide and master in stored else own
    return entry.name if entry.name in stored else None


def _size(dtype: str) -> int:
    return ITEM_SIZE.get(dtype, 8)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "nothing") + more


def _kept(state: ProgramState, manifest: Manifest) -> dict[str, list[str]]:
    idle = state.idle()
    keys = {key for key, _, _ in state.stated()} | idle.keys()
    # The names of the states that the checkpoint has, by parameter; both may have dots.
    found: dict[str, list[str]] = {}
    for name in (n.removeprefix(STATE) for n in manifest.tensors if n.startswith(STATE)):
        words = name.split(".")
        for length in range(1, len(words)):
            if (key := ".".join(words[:length])) in keys:
                found.setdefault(key, []).append(".".join(words[length:]))
    known: dict[str, list[str]] = {}
    every = state.training.states
    foreign = {x.key for each in every if is_foreign(each.optimizer) for x in each.members}
    for key, states, _ in state.stated():
        saved = found.get(key, [])
        # States of third-party optimizers may appear in a later step.
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


@final
@dataclass(frozen=True)
class _CheckpointReader:
    """Reads what ranks hold, from the tensors `sources` of a checkpoint (None: the entry keeps its values).

    `kept`: names of states that the checkpoint has as tensors, by parameter; `numbers`: its other states.
    """

    state: ProgramState
    manifest: Manifest
    sources: Mapping[str, str | None]
    kept: Mapping[str, Sequence[str]]
    numbers: Mapping[str, Mapping[str, Any]]

    def read(self, entries: Sequence[SavedTensor], reading: Reading) -> None:
        """Read all values, once it is known that they fit."""
        into = read_by(self.manifest, reading)
        for entry in entries:
            if (source := self.sources[entry.name]) is not None:
                for rank, part in entry.parts.items():
                    into(source, entry.pieces(rank), part)
        self.waiting(into)
        # Files of a model alone say nothing of states, which stay.
        if self.manifest.about or any(self.kept.values()):
            self.states(into)
            self.idle(into)

    def waiting(self, into: Read) -> None:
        """Keep the FP32 main parameters that were saved of parameters that no plan updates so far."""
        precision, found = self.state.setting.options.precision, {}
        for key, parameter in self.state.idle().items():
            tensor, stored = parameter.tensor, self.manifest.tensors.get(MASTERS + key)
            narrow = tensor.dtype in (torch.bfloat16, torch.float16)
            if stored is None or not narrow or precision is None or not precision.masters:
                continue
            if stored.shape == tuple(tensor.shape):
                name, shape = MASTERS + key, stored.shape
                found[key] = tensor, read_like(name, shape, torch.float32, tensor, into)
        self.state.training.masters.wait(found)

    def states(self, into: Read) -> None:
        """Let the ranks keep the states that were saved, and let go of others."""
        values: dict[str, dict[int, dict[str, Any]]] = {}
        for key, states, shares in self.state.stated():
            for rank, variables in self.state.setting.variables.items():
                if key not in variables:
                    continue
                own: dict[str, Any] = {}
                for name in self.kept.get(key, ()):
                    value = states[name]
                    layout, dtype = value.laid, getattr(torch, value.dtype)
                    if rank in layout.placement.coordinates:
                        shape, device = layout.local_shape(value.shape, rank), variables[key].device
                        own[name] = torch.empty(shape, dtype=dtype, device=device)
                        pieces = pieces_of(value.shape, layout, shares.get(name), rank)
                        into(f"{STATE}{key}.{name}", pieces, own[name])
                own |= self.numbers.get(key, {})
                if own:
                    values.setdefault(key, {})[rank] = own
        for each in self.state.training.states:
            each.put(values)

    def idle(self, into: Read) -> None:
        """Let optimizers hold what was saved of parameters that no plan updates so far; it may be nothing."""
        for key, parameter in self.state.idle().items():
            held: dict[str, Any] = {}
            for name in self.kept.get(key, ()):
                own = f"{STATE}{key}.{name}"
                stored = self.manifest.tensors[own]
                dtype = getattr(torch, stored.dtype)
                held[name] = read_like(own, stored.shape, dtype, parameter.tensor, into)
            held |= self.numbers.get(key, {})
            parameter.optimizer.state.pop(parameter.tensor, None)
            if held:
                parameter.optimizer.state[parameter.tensor] = held
