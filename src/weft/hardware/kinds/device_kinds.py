"""The catalogue of device kinds, and the reader of their files.

A file says all its figures in units that their keys name. `sources` gives the source of each figure, by key; what
stands under `efficiency` is calibrated once for a kind (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, final

from weft.errors import UserError
from weft.plain_yaml import read_plain_yaml
from weft.schema import Bounds, Key, OneOf, check_known, keys_of, read
from weft.units import Bytes, Seconds

DEVICES = Path(__file__).parent.parent / "catalogue" / "devices"
# GB a second that any link or memory is above; times that follow from less are no numbers.
SLOWEST = 1e-9
_Dtype = Annotated[
    str,
    OneOf(("float64", "float32", "tf32", "bfloat16", "float16", "float8", "float4", "int8")),
]
_Share = Annotated[float, Bounds(above=0, most=1)]
Rate = Annotated[float, Bounds(above=SLOWEST, most=1e12, unit=1e9)]
Microseconds = Annotated[Seconds, Bounds(most=1e9, unit=1e-6)]


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


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, as plain data.

    Raises:
        UserError: when there is none, when it is no YAML, or larger than any.
    """
    return read_plain_yaml(path, "a description of hardware", numbers=True)


def parse_device_kind(content: Any, where: str) -> DeviceKind:
    """A kind from the content of a file; `where` is named in errors.

    Raises:
        UserError: when a field is missing, unknown or out of range.
    """
    found = read(DeviceKind, content, where)
    check_known(found.sources, keys_of(DeviceKind), f"{where}: sources", "field")
    for name, part, needed in (
        ("peaks_tflops", found.peaks, ("float32",)),
        ("efficiency", found.efficiency, OP_CLASSES),
    ):
        for each in needed:
            if each not in part:
                raise UserError(f"{where}: {name}: {each} must be given, got {', '.join(part)}")
    return found


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
_OpClass = Annotated[str, OneOf(OP_CLASSES)]
# Those that run on the matrix units; all others compute on the vector units, whose peak is that of float32.
ON_MATRIX_UNITS = frozenset(("product", "attention", "convolution"))


@final
class Tile(NamedTuple):
    """The part of a matrix product's result that one unit of the device makes at a time.

    Attributes:
        rows, columns: of the result.
        share: of its peak that a unit reaches with it, above 0 and at most 1.
    """

    rows: Annotated[int, Bounds(least=1)]
    columns: Annotated[int, Bounds(least=1)]
    share: _Share = 1.0


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

    compute: _Share = 1.0
    traffic: _Share = 1.0
    of_dtype: Mapping[_Dtype, _Share] = field(default_factory=dict)
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
        host: bytes a second that it sends to its host's memory, or gets from there; where a file does not say it, 80 %
            of PCIe 3.0 x16.
        sources: of the figures, by their keys in the file.
    """

    name: str
    device_type: Annotated[str, OneOf(("cpu", "cuda"))]
    peaks: Annotated[
        Mapping[_Dtype, Annotated[float, Bounds(above=0, unit=1e12)]], Key("peaks_tflops")
    ]
    traffic: Annotated[Rate, Key("traffic_gb_per_second")]
    memory: Annotated[Bytes, Bounds(above=0, unit=2**30), Key("memory_gib")]
    start: Annotated[Microseconds, Key("start_microseconds")]
    act: Annotated[Microseconds, Key("act_microseconds")]
    reserve: Annotated[Bytes, Bounds(unit=2**20), Key("reserve_mib")]
    efficiency: Mapping[_OpClass, Efficiency]
    units: Annotated[int, Bounds(least=1)] = 1
    tiles: tuple[Tile, ...] = ()
    slowdown: Annotated[float, Bounds(least=1, most=100)] = 1.0
    host: Annotated[Rate, Key("host_gb_per_second")] = 12.5e9
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def has_peak(self, dtype: str) -> bool:
        """False where a dtype computes as float32 does, for want of a figure."""
        return ("float8" if dtype.startswith("float8") else dtype) in self.peaks

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype; those without a peak of their own compute as float32 does, complex ones too."""
        found = self.peaks.get("float8" if dtype.startswith("float8") else dtype)
        return self.peaks["float32"] if found is None else found
