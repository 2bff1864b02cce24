"""The files of a checkpoint: safetensors, as `torch.distributed.checkpoint` writes and reads them.

Its `HuggingFaceStorageReader` reads these, and what its `HuggingFaceStorageWriter` writes is read here: where the box
of a tensor that a file holds is in the whole is in the file's header.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.errors import UNREADABLE, DamagedCheckpoint, UserError
from weft.layout.layout import Region, overlap, region_shape, region_size, within

T = TypeVar("T")

SUFFIX = ".safetensors"
_DAMAGE: tuple[type[Exception], ...] = (*UNREADABLE, SafetensorError, RuntimeError)
# Threads that check or sum at a time.
THREADS = 4
# The keys in a header by which torch.distributed.checkpoint knows what part of a tensor a file holds.
_SHARDING, _OFFSETS, _VERSION = "DCP_SHARDING_INFO", "saved_offsets", "DCP_VERSION"
# As headers of safetensors name dtypes.
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
# Marks files that have a manifest beside them.
_MARK = "weft"


@final
@dataclass(frozen=True)
class Extent:
    """A box of a tensor in a file.

    Attributes:
        key: the tensor's name in the file.
        whole: where it is in the tensor.
        checksum: CRC-32 of its bytes, row-major; None if the file was written by another program.
    """

    file: str
    key: str
    whole: Region
    checksum: int | None


def write_file(
    folder: Path, file: str, pieces: Mapping[str, tuple[Region, Tensor]]
) -> dict[str, int]:
    """Write a file with a box of each of some tensors, and wait until it is on the disk; the checksums of the boxes.

    `pieces`: by the tensor's name, where the box lies, and its values. Raises UserError where it cannot be written.
    """
    values = plain_values({name: tensor for name, (_, tensor) in pieces.items()})
    sharding = {name: {_OFFSETS: [at for at, _ in whole]} for name, (whole, _) in pieces.items()}
    about = {"format": "pt", _VERSION: "1.0", _SHARDING: json.dumps(sharding), _MARK: "1"}
    path = folder / file
    try:
        sums = summing(list(values.values()))
        save_file(values, path, about)
        to_disk(path)
        return dict(zip(values, sums(), strict=True))
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}") from None


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return 0
    if tensor.numel() == 1:
        # It counts as contiguous whatever its stride is, and has no view as bytes where that is not 1.
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def summing(tensors: Sequence[Tensor]) -> Callable[[], list[int]]:
    """Start computing checksums of contiguous CPU tensors in threads; the returned function gives them.

    The threads are its own: `concurrent.futures` accepts no work when a process ends, which may happen while
    a checkpoint is written.
    """
    left: SimpleQueue[int] = SimpleQueue()
    sums: dict[int, int] = {}
    for number in range(len(tensors)):
        left.put(number)

    def work() -> None:
        with suppress(Empty):
            while True:
                number = left.get_nowait()
                sums[number] = checksum(tensors[number])

    threads = [Thread(target=work, name="weft checksum", daemon=True) for _ in range(THREADS)]
    # From Python 3.12 on a process that ends starts none; who asks for the sums makes them then.
    with suppress(RuntimeError):
        for thread in threads:
            thread.start()

    def found() -> list[int]:
        work()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        return [sums[number] for number in range(len(tensors))]

    return found


def extents_of_file(folder: Path, file: str) -> dict[str, tuple[Region, str]]:
    """The boxes in a file, from its header: where each is, and its dtype as text; raises UserError for damage."""
    found = {}
    try:
        with _open(folder / file) as opened:
            about = opened.metadata() or {}
            if _MARK in about:
                raise OSError("the weft.json beside it is gone")
            sharding = json.loads(about.get(_SHARDING, "{}"))
            for name in opened.keys():  # noqa: SIM118  # it is not a dict
                part = opened.get_slice(name)
                shape = part.get_shape()
                offsets = sharding.get(name, {}).get(_OFFSETS, [0] * len(shape))
                if not all(type(at) is int and at >= 0 for at in offsets):
                    raise ValueError(f"{name} has the offsets {offsets!r}")
                found[name] = tuple(zip(offsets, shape, strict=True)), part.get_dtype()
    except _DAMAGE as error:
        raise DamagedCheckpoint(_damaged(folder / file, error)) from None
    return found


def is_shard(folder: Path, file: str) -> bool:
    """True if the header of a file says which part of each tensor it holds."""
    try:
        with _open(folder / file) as opened:
            return _SHARDING in (opened.metadata() or {})
    except _DAMAGE as error:
        raise DamagedCheckpoint(_damaged(folder / file, error)) from None


@final
class Reading:
    """The files of one checkpoint, each of which is opened once. Use as a context: they are closed with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._stack.close()

    def piece(self, extents: Iterable[Extent], whole: Region, into: Tensor) -> None:
        """Read a box of a tensor into a tensor of its shape, its bytes alone; raises UserError where some is gone."""
        left, name = region_size(whole), ""
        for extent in extents:
            common = overlap(whole, extent.whole)
            if not region_size(common):
                continue
            part = self._read(extent, slices(within(common, extent.whole)))
            into[slices(within(common, whole))].copy_(part.reshape(region_shape(common)))
            left, name = left - region_size(common), extent.key
        if left > 0:
            raise DamagedCheckpoint(
                f"{self.folder} holds only a part of {name}; a file is missing: load another checkpoint"
            )

    def check(self, extent: Extent, dtype: str) -> None:
        """Raise DamagedCheckpoint, naming file and tensor, where a box is not what was written, or of another dtype."""

        def kind(file: Any) -> tuple[tuple[int, ...], str]:
            part = file.get_slice(extent.key)
            return tuple(part.get_shape()), str(part.get_dtype())

        shape, stored = self._opening(extent, kind)
        if DTYPES.get(stored, stored) != dtype:
            error = f"its values are of {DTYPES.get(stored, stored)}, expected {dtype}"
            raise DamagedCheckpoint(_damaged(self.folder / extent.file, error, extent.key))
        same = shape == region_shape(extent.whole)
        if same and extent.checksum is not None:
            same = checksum(self._read(extent, None)) == extent.checksum
        if not same:
            error = "its values are not those that were written"
            raise DamagedCheckpoint(_damaged(self.folder / extent.file, error, extent.key))

    def _read(self, extent: Extent, place: tuple[slice, ...] | None) -> Tensor:
        def read(file: Any) -> Tensor:
            found: Tensor = (
                file.get_tensor(extent.key) if place is None else file.get_slice(extent.key)[place]
            )
            return found

        return self._opening(extent, read)

    def _opening(self, extent: Extent, read: Callable[[Any], T]) -> T:
        try:
            if extent.file not in self._opened:
                opened = _open(self.folder / extent.file)
                self._opened[extent.file] = self._stack.enter_context(opened)
            return read(self._opened[extent.file])
        except _DAMAGE as error:
            raise DamagedCheckpoint(
                _damaged(self.folder / extent.file, error, extent.key)
            ) from None


def check_extents(folder: Path, extents: Iterable[tuple[Extent, str]]) -> None:
    """Raise DamagedCheckpoint, naming file and tensor, where a box of some dtype is not what was written."""
    by_file: dict[str, list[tuple[Extent, str]]] = {}
    for extent, dtype in extents:
        by_file.setdefault(extent.file, []).append((extent, dtype))
    # Also one file is read by several threads: checksums take longer than reading.
    parts = [each[n::THREADS] for each in by_file.values() for n in range(THREADS)]

    def check(part: list[tuple[Extent, str]]) -> None:
        with Reading(folder) as reading:
            for extent, dtype in part:
                reading.check(extent, dtype)

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(check, filter(None, parts)):
            pass


def _open(path: Path) -> Any:
    if not path.is_file():
        raise OSError("it is not a file")
    return safe_open(path, framework="pt")


def _damaged(path: Path, error: object, name: str = "") -> str:
    what = f" ({name})" if name else ""
    return f"{path}{what} is missing or damaged: {error}; load another checkpoint"


def plain_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, each with memory of its own, as safetensors wants them: copies where need be."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        # Conjugates and negatives may be views whose bytes are those of another tensor.
        value = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        memory = value.untyped_storage()
        if memory.nbytes() != value.nbytes or memory.data_ptr() in seen:
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        found[name] = value
    return found


def slices(region: Region) -> tuple[slice, ...]:
    """A region as an index."""
    return tuple(slice(at, at + length) for at, length in region)


def to_disk(path: Path) -> None:
    """Wait until a file, or what is in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
