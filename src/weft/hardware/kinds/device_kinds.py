"""The catalogue of device kinds, and the reader of their files.

A file says all its figures in units that their keys name. `sources` gives the source of each figure, by key; what
stands under `efficiency` is calibrated once for a kind (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, final

from weft.errors import UserError
from weft.hardware.fields import SLOWEST, amount, mapping, number, read_yaml, sequence, word
from weft.units import Bytes, Seconds

DEVICES = Path(__file__).parent.parent / "catalogue" / "devices"
_KEYS = (
    *("name", "device_type", "peaks_tflops", "traffic_gb_per_second", "memory_gib"),
    *("start_microseconds", "act_microseconds", "reserve_mib", "units", "tiles"),
    *("slowdown", "host_gb_per_second", "efficiency", "sources"),
)
_PEAKS = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "float4", "int8")
# 10^9 bytes a second to the host where a file does not say it: 80 % of PCIe 3.0 x16.
HOST = 12.5
MOST_SLOWDOWN = 100.0
_SHARES = ("compute", "traffic", "of_dtype", "depth")


def device_kinds() -> tuple[str, ...]:
    """The names of the catalogue's kinds, in order."""
    return tuple(sorted(path.stem for path in DEVICES.glob("*.yaml")))


@cache
def device_kind(name: str) -> DeviceKind:
    """A kind of the catalogue by its name, such as "a100-sxm-80gb".

    Raises:
        UserError: when there is none of this name.
    """
    if name not in device_kinds():
        raise UserError(f"no device kind is named {name!r}; there are {', '.join(device_kinds())}")
    return read_device_kind(DEVICES / f"{name}.yaml")


def read_device_kind(path: Path) -> DeviceKind:
    """A kind from a file of one's own.

    Raises:
        UserError: when it cannot be read, or a field is missing, unknown or out of range.
    """
    return parse_device_kind(read_yaml(path), str(path))


def parse_device_kind(content: Any, where: str) -> DeviceKind:
    """A kind from the content of a file; `where` is named in errors.

    Raises:
        UserError: when a field is missing, unknown or out of range.
    """
    fields = mapping(content, where, _KEYS)
    mapping(fields.get("sources", {}), f"{where}: sources", _KEYS)
    peaks = mapping(fields.get("peaks_tflops"), f"{where}: peaks_tflops", _PEAKS)
    at = f"{where}: peaks_tflops"
    flops = {dtype: 1e12 * number(peaks, dtype, at) for dtype in ("float32", *peaks)}
    return DeviceKind(
        name=word(fields, "name", where),
        device_type=word(fields, "device_type", where, ("cpu", "cuda")),
        peaks=flops,
        traffic=1e9 * number(fields, "traffic_gb_per_second", where, above=SLOWEST),
        memory=Bytes(round(2**30 * number(fields, "memory_gib", where))),
        start=Seconds(1e-6 * amount(fields, "start_microseconds", where)),
        act=Seconds(1e-6 * amount(fields, "act_microseconds", where)),
        reserve=Bytes(round(2**20 * amount(fields, "reserve_mib", where))),
        efficiency=_efficiencies(fields.get("efficiency"), f"{where}: efficiency"),
        units=round(number(fields, "units", where, 1, above=0.5)),
        tiles=_tiles(fields.get("tiles", []), f"{where}: tiles"),
        slowdown=_slowdown(fields, where),
        host=1e9 * number(fields, "host_gb_per_second", where, HOST, above=SLOWEST),
    )


def _slowdown(fields: Mapping[str, Any], where: str) -> float:
    found = number(fields, "slowdown", where, 1.0)
    if not 1.0 <= found <= MOST_SLOWDOWN:
        raise UserError(
            f"{where}: slowdown is the factor by which calls take longer beside a communication, from 1 to "
            f"{MOST_SLOWDOWN:g}; found {found:g}"
        )
    return found


def _efficiencies(content: Any, where: str) -> Mapping[str, Efficiency]:
    classes = mapping(content, where, OP_CLASSES)
    missing = [name for name in OP_CLASSES if name not in classes]
    if missing:
        raise UserError(f"{where}: expected the class {missing[0]}, found {', '.join(classes)}")
    return {name: _efficiency(classes[name], f"{where}: {name}") for name in OP_CLASSES}


def _efficiency(content: Any, where: str) -> Efficiency:
    fields = mapping(content, where, _SHARES)
    at = f"{where}: of_dtype"
    of_dtype = mapping(fields.get("of_dtype", {}), at, _PEAKS)
    return Efficiency(
        number(fields, "compute", where, 1.0, most=1.0),
        number(fields, "traffic", where, 1.0, most=1.0),
        {dtype: number(of_dtype, dtype, at, most=1.0) for dtype in of_dtype},
        amount(fields, "depth", where, 0.0),
    )


def _tiles(content: Any, where: str) -> tuple[Tile, ...]:
    return tuple(_tile(one, where) for one in sequence(content, where))


def _tile(content: Any, where: str) -> Tile:
    """A tile, written `[rows, columns, share]`."""
    parts = sequence(content, where)
    if len(parts) != 3:
        raise UserError(f"{where}: a tile is [rows, columns, share]; found {parts}")
    fields = dict(zip(("rows", "columns", "share"), parts, strict=True))
    return Tile(
        round(number(fields, "rows", where, above=0.5)),
        round(number(fields, "columns", where, above=0.5)),
        number(fields, "share", where, most=1.0),
    )


# Classes of ops that reach shares of their own of a device's peaks.
OP_CLASSES = (
    "product",
    "attention",
    "convolution",
    "normalisation",
    "embedding",
    "elementwise",
    "update",
)
# Those that run on the matrix units; all others compute on the vector units, whose peak is that of float32.
ON_MATRIX_UNITS = frozenset(("product", "attention", "convolution"))


@final
@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a matrix product's result that one unit of the device makes at a time.

    Attributes:
        rows, columns: of the result.
        share: of its peak that a unit reaches with it, above 0 and at most 1.
    """

    rows: int
    columns: int
    share: float = 1.0


@final
@dataclass(frozen=True, slots=True)
class Efficiency:
    """The shares of a device's peaks that a class of ops reaches when calls are large.

    Attributes:
        compute: share of the peak of FLOP/s, above 0 and at most 1.
        traffic: share of the memory's bandwidth, above 0 and at most 1.
        of_dtype: shares of the peak for dtypes that reach another one than `compute`.
        depth: length of a contraction at which a product reaches half of its share; 0 for none.
    """

    compute: float = 1.0
    traffic: float = 1.0
    of_dtype: Mapping[str, float] = field(default_factory=dict)
    depth: float = 0.0

    def share(self, dtype: str) -> float:
        """Share of the peak of FLOP/s for calls in a dtype."""
        return self.of_dtype.get(dtype, self.compute)


@final
@dataclass(frozen=True)
class DeviceKind:
    """A kind of device, as its file in the catalogue says it.

    Attributes:
        name: such as "h100-sxm-80gb".
        device_type: "cpu" or "cuda".
        peaks: FLOP/s by dtype as the IR names it; besides "tf32" and "float8" where the device has them.
        traffic: bytes a second that it reads and writes in its own memory.
        memory: that it has.
        start: fixed time of any call on the device.
        act: overhead of the host for an act of an actor.
        reserve: what the context, the allocator's reserve and the communicators' buffers take of the memory.
        efficiency: shares that are reached, for each of `OP_CLASSES`.
        units: parts of the device that make tiles at the same time (streaming multiprocessors).
        tiles: those that matrix products may be made of; the quickest counts. None: any shape is as good.
        slowdown: factor by which calls take longer while a communication runs beside them.
        host: bytes a second that it sends to its host's memory, or gets from there.
    """

    name: str
    device_type: str
    peaks: Mapping[str, float]
    traffic: float
    memory: Bytes
    start: Seconds
    act: Seconds
    reserve: Bytes
    efficiency: Mapping[str, Efficiency]
    units: int = 1
    tiles: tuple[Tile, ...] = ()
    slowdown: float = 1.0
    host: float = 12.5e9

    def has_peak(self, dtype: str) -> bool:
        """False where a dtype computes as float32 does, for want of a figure."""
        return ("float8" if dtype.startswith("float8") else dtype) in self.peaks

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype; those without a peak of their own compute as float32 does, complex ones too."""
        found = self.peaks.get("float8" if dtype.startswith("float8") else dtype)
        return self.peaks["float32"] if found is None else found
