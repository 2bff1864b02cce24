"""Units as types: what takes seconds is not given bytes."""

from __future__ import annotations

from typing import NewType

Bytes = NewType("Bytes", int)
Flops = NewType("Flops", int)
Seconds = NewType("Seconds", float)

NO_BYTES = Bytes(0)
NO_TIME = Seconds(0.0)

# Size of one element of every dtype that weft's graphs may hold, in bytes.
ITEM_SIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


def seconds_text(seconds: Seconds) -> str:
    """A time in milliseconds, or in seconds: 1.5 ms, 0.0123 ms, 12.5 s."""
    if seconds >= 0.9995:  # a thousand milliseconds, as they are rounded
        return f"{seconds:.4g} s"
    return f"{1000 * seconds:.3g} ms"


def counted(number: int, one: str, several: str = "") -> str:
    """A number of things: 1 rank, 2 ranks; `several` is the plural where it is not that with an s."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def bytes_text(size: int) -> str:
    """A number of bytes with a unit: 512 B, 1.5 KiB, 20.0 MiB."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"
