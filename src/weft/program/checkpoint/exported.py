"""Conversion between checkpoints and files of other programs: sharded safetensors of Hugging Face,
torch.distributed.checkpoint.

The metadata of `torch.distributed.checkpoint`'s default format is a pickle, which may call anything. Here the pickle
may name only the classes of such metadata; tensors are loaded with `weights_only=True`, as torch does it.
"""

from __future__ import annotations

import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PosixPath, PurePosixPath
from types import MappingProxyType
from typing import Any, Final, final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from weft.errors import DamagedCheckpoint, UserError, wrong
from weft.ops.cost import dtype_name
from weft.program.checkpoint.files import (
    SUFFIX,
    Extent,
    Reading,
    check_extents,
    to_disk,
    write_file,
)
from weft.program.checkpoint.load import renamed_in
from weft.program.checkpoint.manifest import (
    Manifest,
    Stored,
    abandon,
    begin,
    open_as_usual,
    publish,
    read_manifest,
)
from weft.program.checkpoint.program_state import MASTERS, MODEL
from weft.program.checkpoint.save import TIED
from weft.units import ITEM_SIZE, Bytes, counted

# The file of torch.distributed.checkpoint's metadata.
METADATA: Final = ".metadata"
# For a file, as `transformers` has it.
MOST: Final = Bytes(5 * 10**9)
INDEX = f"model{SUFFIX}.index.json"
# Dtypes that numbers can be rounded to.
ROUNDED = ("float64", "float32", "float16", "bfloat16")


@final
@dataclass(frozen=True)
class Written:
    """The files that were written, and how many tensors and bytes are in them."""

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
        dtype: of floating-point tensors in the files, such as "bfloat16"; by default that of the checkpoint.
        masters: take the FP32 main parameters of each parameter that has one.

    Raises:
        UserError: there is no checkpoint, it is damaged or holds no model; or the folder cannot be written.
    """
    if dtype and dtype not in ROUNDED:
        raise wrong("dtype", f"one of {', '.join(ROUNDED)}", dtype)
    if most < 1:
        raise wrong("the bytes of a file", "a number from 1", most)
    manifest = read_manifest(checkpoint)
    named = _model(manifest, masters)
    extents = ((extent, each.dtype) for each in named.values() for extent in each.extents)
    check_extents(checkpoint, extents)
    files = _files({name: _rounded_bytes(each, dtype) for name, each in named.items()}, most)
    beside = begin(folder)
    try:
        with Reading(checkpoint) as reading:
            for file, names in files.items():
                values = {name: _value(reading, named[name], dtype) for name in names}
                save_file(values, beside / file, {"format": "pt"})
                to_disk(beside / file)
        total = sum(_rounded_bytes(each, dtype) for each in named.values())
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
    beside, stored = begin(checkpoint), dict[str, Stored]()
    try:
        for number, part in enumerate(_files(sizes, MOST).values(), 1):
            file, values = f"shard-00001-model-{number:05d}{SUFFIX}", tensors.read(part)
            whole = {name: tuple((0, size) for size in x.shape) for name, x in values.items()}
            sums = write_file(beside, file, {n: (whole[n], x) for n, x in values.items()})
            for name, x in values.items():
                extent = Extent(file, name, whole[name], sums[name])
                stored[name] = Stored(tuple(x.shape), dtype_name(x.dtype), (extent,))
        publish(beside, checkpoint, Manifest(checkpoint, stored, {"names": sorted(stored)}))
    finally:
        abandon(beside)
    return Written(checkpoint, len(stored), Bytes(sum(sizes.values())))


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
        return {name: _bytes(each.shape, each.dtype) for name, each in self._stored.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        with Reading(self._folder) as reading:
            return {name: _value(reading, self._stored[name]) for name in names}


def _model(manifest: Manifest, masters: bool) -> dict[str, Stored]:
    stored = manifest.tensors
    named = {name.removeprefix(MODEL): x for name, x in stored.items() if name.startswith(MODEL)}
    if not named:
        raise UserError(
            f"{manifest.folder} holds no model: the names of its tensors begin with {MODEL!r}; give the folder that "
            "program.save has written"
        )
    if masters:
        tied = manifest.about.get(TIED, {})
        if not isinstance(tied, dict) or not all(isinstance(each, str) for each in tied.values()):
            raise DamagedCheckpoint(
                f"{manifest.folder}: its entry for tied tensors holds no names; load another checkpoint"
            )
        for name in named:
            own = tied.get(MODEL + name, MODEL + name).removeprefix(MODEL)
            named[name] = stored.get(MASTERS + own, named[name])
    return dict(sorted(named.items()))


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * ITEM_SIZE.get(dtype, 1)


def _rounded_bytes(stored: Stored, dtype: str) -> int:
    """The bytes of a tensor, rounded to a dtype where it has floating-point numbers, and one is given."""
    return _bytes(stored.shape, dtype if dtype and "float" in stored.dtype else stored.dtype)


def _files(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """The names of each file, in order; a file has more bytes than `most` only where one tensor has."""
    parts: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if parts[-1] and held + size > most:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    if len(parts) == 1:
        return {f"model{SUFFIX}": parts[0]}
    return {f"model-{n:05d}-of-{len(parts):05d}{SUFFIX}": x for n, x in enumerate(parts, 1)}


def _value(reading: Reading, stored: Stored, dtype: str = "") -> Tensor:
    value = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    reading.piece(stored.extents, tuple((0, size) for size in stored.shape), value)
    return value.to(getattr(torch, dtype)) if dtype and value.is_floating_point() else value


# Bytes that metadata may have.
_MOST_METADATA = 1 << 30
_OPTIMIZER = "optimizer.state."
_OF_METADATA, _OF_FILES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise ValueError(f"{name!r} is not a layout")
    return layout


_CLASSES: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
}


@final
class Distcp:
    """The tensors of such a checkpoint (a folder with ".metadata"), by the names that a weft checkpoint has for them.

    Entries of {"model": …} and {"optimizer": {"state": …}} keep their names; a model that was saved alone is
    "model.…". Raises DamagedCheckpoint where it cannot be read, or names what no such metadata is made of.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _read(folder)
        every = self._metadata.state_dict_metadata
        paths = {name: (self._metadata.planner_data or {}).get(name, (name,)) for name in every}
        nested = any(len(path) > 1 for path in paths.values())
        # Names there, and what is stored, by the names here.
        self._stored: dict[str, tuple[str, of_torch.TensorStorageMetadata]] = {}
        for name, each in every.items():
            if isinstance(each, of_torch.TensorStorageMetadata):
                # A weft checkpoint has no place for anything else; a model alone is not nested.
                own = name if nested else f"model.{name}"
                if not nested or paths[name][0] == "model" or name.startswith(_OPTIMIZER):
                    self._stored[own] = name, each
        if not self._stored:
            heads = ", ".join(sorted({str(path[0]) for path in paths.values()}))
            raise UserError(
                f"{folder} has no tensors under 'model': its entries are under {heads or 'nothing'}; expected "
                "those of {'model': …, 'optimizer': …}, or a model's state_dict alone"
            )

    def sizes(self) -> dict[str, int]:
        every = [(own, self._stored[own][1]) for own in sorted(self._stored)]
        return {own: _bytes(each.size, dtype_name(each.properties.dtype)) for own, each in every}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        wanted = {own: self._stored[own] for own in names}
        state = {
            name: torch.empty(each.size, dtype=each.properties.dtype)
            for name, each in wanted.values()
        }
        try:
            load(state, storage_reader=_DistcpFiles(self._folder, self._metadata), no_dist=True)
        except (Exception, CheckpointException) as error:  # of many kinds, for what a file may hold
            why = str(error).strip().splitlines()[-1:]
            raise DamagedCheckpoint(
                f"{self._folder} lacks a file or is damaged: {''.join(why)}; load another checkpoint"
            ) from None
        return {own: state[name] for own, (name, _) in wanted.items()}


@final
class _DistcpFiles(FileSystemReader):
    """Reads files for metadata that was read before."""

    def __init__(self, folder: Path, metadata: of_torch.Metadata) -> None:
        super().__init__(folder)
        self._read_before = metadata

    def read_metadata(self, *_: Any, **__: Any) -> of_torch.Metadata:
        return self._read_before


def _read(folder: Path) -> of_torch.Metadata:
    path = folder / METADATA
    try:
        if path.stat().st_size > _MOST_METADATA:
            raise ValueError(f"it has more than {_MOST_METADATA} bytes")
        with path.open("rb") as opened:
            metadata = _Known(opened).load()
        if not isinstance(metadata, of_torch.Metadata):
            raise ValueError(f"it is a {type(metadata).__name__}")
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"{info.relative_path!r} is not a name of a file")
    except Exception as error:  # of many kinds, for what a pickle may hold
        raise DamagedCheckpoint(
            f"{path} is damaged, or no metadata of torch.distributed.checkpoint: {type(error).__name__}: {error}; load "
            "another checkpoint"
        ) from None
    return metadata


@final
class _Known(pickle.Unpickler):
    """Loads metadata, and refuses whatever else a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        """A class or constant of metadata."""
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if "." not in name:
            if module in (_OF_METADATA, _OF_FILES):
                found = getattr(__import__(module, fromlist=[name]), name, None)
                # Dataclasses and enums hold values, and do nothing.
                holds = hasattr(found, "__dataclass_fields__") or hasattr(found, "__members__")
                if isinstance(found, type) and found.__module__ == module and holds:
                    return found
            found = getattr(torch, name, None) if module == "torch" else None
            if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                return found
        raise ValueError(f"it names {module}.{name}, which no metadata is made of")
