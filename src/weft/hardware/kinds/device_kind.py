"""DeviceKind: a kind of device as data, its peaks and the shares of them that classes of ops reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from weft.units import Bytes, Seconds

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
