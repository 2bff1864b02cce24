"""The files of a checkpoint: safetensors, as `torch.distributed.checkpoint` writes and reads them.

Its `HuggingFaceStorageReader` reads these, and what its `HuggingFaceStorageWriter` writes is read here: where the box
of a tensor that a file holds lies in the whole stands in the file's header.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.errors import UserError
from weft.layout.region import Region, overlap, region_shape, region_size, within

SUFFIX = ".safetensors"
# The keys in a header by which torch.distributed.checkpoint knows what part of a tensor a file holds.
_SHARDING, _OFFSETS, _VERSION = "DCP_SHARDING_INFO", "saved_offsets", "DCP_VERSION"


@final
@dataclass(frozen=True)
class Extent:
    """A box of a tensor in a file.

    Attributes:
        file: its name.
        key: the tensor's name in the file.
        whole: where it lies in the tensor.
        checksum: CRC-32 of its bytes, row-major; None where the file was written by another program.
    """

    file: str
    key: str
    whole: Region
    checksum: int | None


def write_file(
    folder: Path, file: str, pieces: Mapping[str, tuple[Region, Tensor]]
) -> dict[str, int]:
    """Write a file with a box of each of some tensors, and wait until it is on the disk.

    Args:
        folder: where.
        file: its name.
        pieces: by the tensor's name: where the box lies, and its values.

    Returns:
        The checksums of the boxes.

    Raises:
        UserError: it cannot be written, as where the disk is full.
    """
    values = _plain({name: tensor for name, (_, tensor) in pieces.items()})
    offsets = {name: {_OFFSETS: [at for at, _ in whole]} for name, (whole, _) in pieces.items()}
    about = {"format": "pt", _VERSION: "1.0", _SHARDING: json.dumps(offsets)}
    path = folder / file
    try:
        save_file(values, path, about)
        _to_disk(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}") from None
    return {name: checksum(value) for name, value in values.items()}


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a contiguous tensor on the CPU."""
    flat = (
        tensor.reshape(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )
    return zlib.crc32(flat.numpy().data)


def extents_of_file(folder: Path, file: str) -> dict[str, tuple[Region, str]]:
    """The boxes in a file, from its header: where each lies, and its dtype as text.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    found = {}
    try:
        with safe_open(folder / file, framework="pt") as opened:
            sharding = json.loads((opened.metadata() or {}).get(_SHARDING, "{}"))
            for name in opened.keys():  # noqa: SIM118  # it is no dict
                part = opened.get_slice(name)
                shape = part.get_shape()
                offsets = sharding.get(name, {}).get(_OFFSETS, [0] * len(shape))
                found[name] = tuple(zip(offsets, shape, strict=True)), part.get_dtype()
    except (OSError, SafetensorError, ValueError, AttributeError, TypeError) as error:
        raise UserError(_damaged(folder / file, error)) from None
    return found


def read_piece(folder: Path, extents: Iterable[Extent], whole: Region, into: Tensor) -> None:
    """Read a box of a tensor into a tensor of its shape; only its bytes are read.

    Raises:
        UserError: a file cannot be read, or no file holds some of it.
    """
    left, name = region_size(whole), ""
    for extent in extents:
        common = overlap(whole, extent.whole)
        if not region_size(common):
            continue
        try:
            with safe_open(folder / extent.file, framework="pt") as opened:
                part = opened.get_slice(extent.key)[slices(within(common, extent.whole))]
        except (OSError, SafetensorError) as error:
            raise UserError(_damaged(folder / extent.file, error, extent.key)) from None
        into[slices(within(common, whole))].copy_(part.reshape(region_shape(common)))
        left, name = left - region_size(common), extent.key
    if left > 0:
        raise UserError(f"{folder} holds only a part of {name}; a file is missing")


def check_extent(folder: Path, extent: Extent) -> None:
    """Raise UserError, naming file and tensor, where a box is not what was written."""
    if extent.checksum is None:
        return
    try:
        with safe_open(folder / extent.file, framework="pt") as opened:
            value = opened.get_tensor(extent.key)
    except (OSError, SafetensorError) as error:
        raise UserError(_damaged(folder / extent.file, error, extent.key)) from None
    if (
        tuple(value.shape) != region_shape(extent.whole)
        or checksum(value.contiguous()) != extent.checksum
    ):
        raise UserError(
            _damaged(folder / extent.file, "its values are not those that were written", extent.key)
        )


def _damaged(path: Path, error: object, name: str = "") -> str:
    what = f" ({name})" if name else ""
    return f"{path}{what} is missing or damaged: {error}; load another checkpoint"


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, each with memory of its own, as safetensors wants them: copies where need be."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        memory = value.untyped_storage()
        if memory.nbytes() != value.nbytes or memory.data_ptr() in seen:
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        found[name] = value
    return found


def slices(region: Region) -> tuple[slice, ...]:
    """A region as an index."""
    return tuple(slice(at, at + length) for at, length in region)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
