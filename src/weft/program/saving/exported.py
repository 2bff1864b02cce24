"""Checkpoints and the files of Hugging Face: sharded safetensors with an index, under a model's own names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft.errors import DamagedCheckpoint, UserError
from weft.program.saving.distcp import NAME as METADATA
from weft.program.saving.distcp import Distcp
from weft.program.saving.files import SUFFIX, Extent, Reading, check_extents, to_disk, write_file
from weft.program.saving.manifest import (
    Manifest,
    Stored,
    abandon,
    begin,
    open_as_usual,
    publish,
    read_manifest,
)
from weft.program.saving.program_state import MASTERS, MODEL
from weft.program.saving.save import TIED
from weft.program.saving.weights import renamed_in
from weft.units import ITEM_SIZE, Bytes, counted

# Of a file, as `transformers` has it.
MOST: Final = Bytes(5 * 10**9)
INDEX = f"model{SUFFIX}.index.json"
# Dtypes that numbers can be rounded to.
ROUNDED = ("float64", "float32", "float16", "bfloat16")


@final
@dataclass(frozen=True)
class Written:
    """The files that were written.

    Attributes:
        tensors, bytes: in them.
    """

    folder: Path
    tensors: int
    bytes: Bytes

    def __str__(self) -> str:
        return f"{self.folder}: {counted(self.tensors, 'tensor')}, {self.bytes} bytes"


def export(
    checkpoint: Path, folder: Path, most: Bytes = MOST, dtype: str = "", masters: bool = False
) -> Written:
    """Write the model of a checkpoint as `transformers` and `safetensors` read it. One tensor at a time is in memory.

    Args:
        checkpoint: that `Program.save` wrote.
        folder: that is not there yet: "model.safetensors", or "model-00001-of-00003.safetensors", … with an index.
        most: bytes of a file.
        dtype: that floating-point tensors are rounded to, such as "bfloat16"; as they are without.
        masters: take the float32 master of each parameter that has one.

    Raises:
        UserError: there is no checkpoint, it is damaged or holds no model; or the folder cannot be written.
    """
    if dtype and dtype not in ROUNDED:
        raise UserError(f"dtype takes one of {', '.join(ROUNDED)}, found {dtype!r}")
    if most < 1:
        raise UserError(f"a file takes bytes from 1, found {most}")
    manifest = read_manifest(checkpoint)
    named = _model(manifest, masters)
    extents = ((extent, each.dtype) for each in named.values() for extent in each.extents)
    check_extents(checkpoint, extents)
    files = _files({name: _bytes(each, dtype) for name, each in named.items()}, most)
    beside = begin(folder)
    try:
        with Reading(checkpoint) as reading:
            for file, names in files.items():
                values = {name: _value(reading, named[name], dtype) for name in names}
                save_file(values, beside / file, {"format": "pt"})
                to_disk(beside / file)
        total = sum(_bytes(each, dtype) for each in named.values())
        if len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (beside / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        open_as_usual(beside)
        beside.rename(folder)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {folder}: {why}") from None
    finally:
        abandon(beside)
    return Written(folder, len(named), Bytes(total))


def import_model(
    source: Path, checkpoint: Path, names: Mapping[str, str] = MappingProxyType({})
) -> Written:
    """Write a checkpoint of files that another program wrote. One file at a time is in memory.

    Args:
        source: a folder of safetensors files as those of Hugging Face, under the names of the model's `state_dict()`,
            which `Program.load` reads as it is; or of `torch.distributed.checkpoint`, with states of optimizers.
        checkpoint: the folder, which is not there yet.
        names: of tensors of safetensors files, as `weft.Weights` takes them.

    Raises:
        UserError: there are no such files, they are damaged, or it is a checkpoint already.
    """
    distcp = (source / METADATA).exists()
    if distcp and names:
        raise UserError(
            f"{source} is of torch.distributed.checkpoint; names takes safetensors files"
        )
    tensors = Distcp(source) if distcp else _Safetensors(source, names)
    sizes = tensors.sizes()
    beside, found = begin(checkpoint), dict[str, Stored]()
    try:
        for number, part in enumerate(_files(sizes, MOST).values(), 1):
            file, values = f"shard-00001-model-{number:05d}{SUFFIX}", tensors.read(part)
            whole = {name: tuple((0, size) for size in x.shape) for name, x in values.items()}
            sums = write_file(beside, file, {n: (whole[n], x) for n, x in values.items()})
            for name, x in values.items():
                extent = Extent(file, name, whole[name], sums[name])
                dtype = str(x.dtype).removeprefix("torch.")
                found[name] = Stored(tuple(x.shape), dtype, (extent,))
        publish(beside, checkpoint, Manifest(checkpoint, found, {"names": sorted(found)}))
    finally:
        abandon(beside)
    return Written(checkpoint, len(found), Bytes(sum(sizes.values())))


@final
class _Safetensors:
    """The tensors of files that another program wrote, by the names that a checkpoint has for them."""

    def __init__(self, folder: Path, names: Mapping[str, str]) -> None:
        manifest = renamed_in(read_manifest(folder), names)
        if manifest.about:
            raise UserError(f"{folder} is a checkpoint already; program.load reads it as it is")
        for name, each in manifest.tensors.items():
            if each.dtype not in ITEM_SIZE:
                raise UserError(
                    f"{folder}: {name} is of dtype {each.dtype}, expected one of {', '.join(ITEM_SIZE)}"
                )
        self._folder = folder
        self._stored = {MODEL + name: each for name, each in manifest.tensors.items()}

    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor."""
        return {name: _bytes(each) for name, each in self._stored.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors, whole."""
        with Reading(self._folder) as reading:
            return {name: _value(reading, self._stored[name]) for name in names}


def _model(manifest: Manifest, masters: bool) -> dict[str, Stored]:
    """The tensors of a model, by the names of its `state_dict()`."""
    stored = manifest.tensors
    found = {name.removeprefix(MODEL): x for name, x in stored.items() if name.startswith(MODEL)}
    if not found:
        raise UserError(
            f"{manifest.folder} holds no model, whose tensors begin with {MODEL!r}; give the folder that program.save "
            "has written"
        )
    if masters:
        tied = manifest.about.get(TIED, {})
        if not isinstance(tied, dict) or not all(isinstance(each, str) for each in tied.values()):
            raise DamagedCheckpoint(
                f"{manifest.folder}: its tied tensors are no names; load another checkpoint"
            )
        for name in found:
            own = tied.get(MODEL + name, MODEL + name).removeprefix(MODEL)
            found[name] = stored.get(MASTERS + own, found[name])
    return dict(sorted(found.items()))


def _bytes(stored: Stored, dtype: str = "") -> int:
    kept = dtype if dtype and "float" in stored.dtype else stored.dtype
    return math.prod(stored.shape) * ITEM_SIZE.get(kept, 1)


def _files(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """The names of each file, in order; a file has more bytes than `most` only where one tensor has."""
    parts = list(_parts(sizes, most))
    if len(parts) == 1:
        return {f"model{SUFFIX}": parts[0]}
    return {f"model-{n:05d}-of-{len(parts):05d}{SUFFIX}": x for n, x in enumerate(parts, 1)}


def _parts(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    part: list[str] = []
    held = 0
    for name, size in sizes.items():
        if part and held + size > most:
            yield part
            part, held = [], 0
        part.append(name)
        held += size
    yield part


def _value(reading: Reading, stored: Stored, dtype: str = "") -> Tensor:
    """A tensor whole, in memory of its own."""
    value = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    reading.piece(stored.extents, tuple((0, size) for size in stored.shape), value)
    return value.to(getattr(torch, dtype)) if dtype and value.is_floating_point() else value
