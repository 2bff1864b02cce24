"""Files of safetensors in mapped memory: their tensors are written in place, again and again, without another copy."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from weft.errors import UserError
from weft.layout.layout import Region, region_shape
from weft.program.saving.files import about_file
from weft.program.saving.manifest import DTYPES
from weft.units import ITEM_SIZE

_CODES = {text: code for code, text in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
# Headers are padded to a multiple of it, so that tensors of every dtype lie at a multiple of their items' size.
_ALIGNED = 8
# Bytes that one piece of a message has at most.
_PIECE = 1 << 28


@final
@dataclass(frozen=True)
class FileBox:
    """A box of a tensor in a file.

    Attributes:
        whole: where it lies in the tensor.
        dtype: as text.
        begin, end: its bytes in the file.
    """

    whole: Region
    dtype: str
    begin: int
    end: int


@final
@dataclass(frozen=True)
class FileForm:
    """A file before it has values.

    Attributes:
        head: its first bytes, the header with its length before it.
        boxes: by the tensor's name.
        bytes: of the whole file.
    """

    head: bytes
    boxes: Mapping[str, FileBox]
    bytes: int


def form_of(pieces: Mapping[str, tuple[Region, str]]) -> FileForm:
    """The form of a file.

    Args:
        pieces: by the tensor's name: where the box lies in the tensor, and its dtype as text.

    Raises:
        UserError: names a tensor of a dtype that safetensors has not.
    """
    known = _CODES.keys() & ITEM_SIZE.keys()
    strange = next((name for name, (_, dtype) in pieces.items() if dtype not in known), None)
    if strange is not None:
        raise UserError(
            f"{strange} is of dtype {pieces[strange][1]}, which safetensors has not; give the model another dtype"
        )
    # The widest items first: then all lie aligned, without holes, which the format does not have.
    order = sorted(pieces, key=lambda name: (-ITEM_SIZE[pieces[name][1]], name))
    entries: dict[str, object] = {
        "__metadata__": about_file({n: [at for at, _ in x[0]] for n, x in pieces.items()})
    }
    ends, end = {}, 0
    for name in order:
        whole, dtype = pieces[name]
        shape = region_shape(whole)
        begin, end = end, end + math.prod(shape) * ITEM_SIZE[dtype]
        ends[name] = begin, end
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNED)
    head = _LENGTH.pack(len(text)) + text
    boxes = {n: FileBox(*pieces[n], len(head) + b, len(head) + e) for n, (b, e) in ends.items()}
    return FileForm(head, boxes, len(head) + end)


@final
class MappedFile:
    """A file of a memory file system, mapped.

    Args:
        path: of the file; None may be there.
        size: in bytes.

    Attributes:
        bytes: all of it, as a tensor of uint8.

    Raises:
        OSError: it cannot be made, as where there is no room.
    """

    def __init__(self, path: Path, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
        try:
            # Where there is no room it says so here; a write into a hole would end the process (SIGBUS).
            os.posix_fallocate(handle, 0, size)
            memory = mmap.mmap(handle, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)


@final
class FormedFile:
    """A mapped file of a form."""

    def __init__(self, path: Path, form: FileForm) -> None:
        self.form = form
        self.mapped = MappedFile(path, form.bytes)
        all_bytes = self.mapped.bytes
        all_bytes[: len(form.head)] = torch.frombuffer(bytearray(form.head), dtype=torch.uint8)
        self._tensors = {
            name: all_bytes[box.begin : box.end]
            .view(getattr(torch, box.dtype))
            .view(region_shape(box.whole))
            for name, box in form.boxes.items()
        }

    def fill(self, parts: Mapping[str, Tensor]) -> None:
        """Write the values of all boxes."""
        for name, tensor in self._tensors.items():
            tensor.copy_(parts[name])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The boxes, in the order of the form."""
        return tuple(self._tensors.values())


def mapped_to_read(path: Path) -> Tensor:
    """The bytes of a file, as a tensor of uint8 that is not to be written."""
    with path.open("r+b") as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=torch.uint8)


def in_pieces(whole: Tensor) -> tuple[Tensor, ...]:
    """A tensor of bytes in pieces for messages."""
    return torch.split(whole, _PIECE)
