"""Checkpoints in the default format of `torch.distributed.checkpoint`, whose metadata is a pickle.

A pickle may call anything. Here it may name what such metadata is made of, and nothing else; tensors are loaded with
`weights_only=True`, as torch does it.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from weft.errors import DamagedCheckpoint, UserError
from weft.units import ITEM_SIZE

NAME = ".metadata"
# Bytes that metadata may have.
_MOST = 1 << 30
_OPTIMIZER = "optimizer.state."
_METADATA, _FILES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)


def _layout(name: str) -> torch.layout:
    """A layout by its name, in place of torch's function of the same use."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise ValueError(f"{name!r} is no layout")
    return found


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
    """The tensors of such a checkpoint, by the names that a weft checkpoint has for them.

    Those of {"model": …} and {"optimizer": {"state": …}} keep their names; a model that was saved alone is "model.…".

    Args:
        folder: with ".metadata" and its files.

    Raises:
        DamagedCheckpoint: it cannot be read, or names what no such metadata is made of.
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
                own = _named(name, paths[name], nested)
                if own:
                    self._stored[own] = name, each
        if not self._stored:
            heads = ", ".join(sorted({str(path[0]) for path in paths.values()}))
            raise UserError(
                f"{folder} has no tensors under 'model': its entries stand under {heads or 'nothing'}; expected "
                "those of {'model': …, 'optimizer': …}, or a model's state_dict alone"
            )

    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor."""
        return {own: _bytes(each) for own, (_, each) in sorted(self._stored.items())}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors, whole."""
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


def _bytes(stored: of_torch.TensorStorageMetadata) -> int:
    dtype = str(stored.properties.dtype).removeprefix("torch.")
    return math.prod(stored.size) * ITEM_SIZE.get(dtype, 8)


def _named(name: str, path: Sequence[Any], nested: bool) -> str:
    """The name in a weft checkpoint; "" for what it has no place for. A model alone is not nested."""
    if not nested:
        return f"model.{name}"
    return name if path[0] == "model" or name.startswith(_OPTIMIZER) else ""


@final
class _DistcpFiles(FileSystemReader):
    """Reads files for metadata that was read before.

    Args:
        metadata: of all.
    """

    def __init__(self, folder: Path, metadata: of_torch.Metadata) -> None:
        super().__init__(folder)
        self._read_before = metadata

    def read_metadata(self, *_: Any, **__: Any) -> of_torch.Metadata:
        """The metadata that was read before."""
        return self._read_before


def _read(folder: Path) -> of_torch.Metadata:
    path = folder / NAME
    try:
        if path.stat().st_size > _MOST:
            raise ValueError(f"it has more than {_MOST} bytes")
        with path.open("rb") as opened:
            found = _Known(opened).load()
        if not isinstance(found, of_torch.Metadata):
            raise ValueError(f"it is a {type(found).__name__}")
        for info in (found.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"{info.relative_path!r} is no name of a file")
    except Exception as error:  # of many kinds, for what a pickle may hold
        raise DamagedCheckpoint(
            f"{path} is damaged, or no metadata of torch.distributed.checkpoint: {type(error).__name__}: {error}; load "
            "another checkpoint"
        ) from None
    return found


@final
class _Known(pickle.Unpickler):
    """Loads metadata, and refuses whatever else a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        """A class or constant of metadata."""
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if "." not in name:
            if module in (_METADATA, _FILES):
                found = getattr(__import__(module, fromlist=[name]), name, None)
                if isinstance(found, type) and found.__module__ == module and _is_record(found):
                    return found
            found = getattr(torch, name, None) if module == "torch" else None
            if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                return found
        raise ValueError(f"it names {module}.{name}, which no metadata is made of")


def _is_record(found: type) -> bool:
    """True for dataclasses and enums: they hold values, and do nothing."""
    return hasattr(found, "__dataclass_fields__") or hasattr(found, "__members__")
