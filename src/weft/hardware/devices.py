"""Device kinds: their catalogue, the reader of their files, and the seconds of calls on them.

A file says all its figures in units that their keys name. `sources` gives the source of each figure, by key; what
is under `efficiency` is calibrated once for a kind (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import ceil, prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple, final

from weft.errors import RuleError, UserError
from weft.ops import OpCall, flops, traffic
from weft.ops.call import slot_specs
from weft.ops.cost import tensor_bytes
from weft.ops.factors import factor_sizes
from weft.ops.rule import KNOWN_CALLS, Rule, rule_of
from weft.ops.weft_ops import WEFT_OPS
from weft.plain_yaml import read_plain_yaml
from weft.schema import Bounds, Key, OneOf, check_known, keys_of, read
from weft.units import Bytes, Flops, Seconds

DEVICES = Path(__file__).parent / "catalogue" / "devices"
# GB a second that any link or memory is above; times that follow from less are not numbers.
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
    """A kind from a user's file.

    Raises:
        UserError: when it cannot be read, or a field is missing, unknown or out of range.
    """
    return parse_device_kind(read_yaml(path), str(path))


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, as plain data.

    Raises:
        UserError: when it is missing, not YAML, or too large.
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
# The ones that run on the matrix units; all others compute on the vector units, whose peak is that of float32.
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
        tiles: those that matrix products may be made of; the fastest counts. None: any shape is as good.
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


# Seconds of calls on a device kind: a roofline whose roofs are the shares of the peaks that classes of ops reach.
#
# Computing and reading go on at the same time, the slower of both counts (Williams, Waterman and Patterson,
# "Roofline", CACM 2009). A matrix product is made of tiles, as many at a time as the device has units, so that its
# last wave may be idle in part (NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave
# quantization); of the kind's tiles the fastest counts. No call is faster than the kind's peaks allow.


# Parts of names of ops, and their class; the first that is found counts.
_NAMED = (
    ("attention", "attention"),
    ("convolution", "convolution"),
    ("embedding", "embedding"),
    ("index_select", "embedding"),
    ("norm", "normalisation"),
    ("softmax", "normalisation"),
    ("batch_moments", "normalisation"),
    ("batch_statistics", "normalisation"),
    ("class_loss", "normalisation"),
    ("nll_loss", "normalisation"),
)

# Copies between the device and its host, which take as long as the link between them needs.
_HOST_COPIES = frozenset(("weft.offload", "weft.load"))
_HOST = "host"


@final
@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product's sizes: `batch` results of (rows, columns), contracted over `depth`."""

    batch: int
    rows: int
    columns: int
    depth: int


@final
@dataclass(frozen=True, slots=True)
class CallWork:
    """The part of a call that its seconds depend on.

    Attributes:
        op_class: one of `OP_CLASSES`, or "host" for a copy to or from the host.
        dtype: that it computes in.
        flops: floating-point operations.
        moved: bytes read and written; of a copy to or from the host those that are sent.
        product: its sizes, where it is a matrix product.
    """

    op_class: str
    dtype: str
    flops: Flops
    moved: Bytes
    product: Product | None = None


def call_seconds(kind: DeviceKind, call: OpCall) -> Seconds:
    """Seconds of one call on a device of a kind, with the start of a call; none for views.

    A call whose op has no rule reads and writes its tensors once.
    """
    work = work_of(call)
    return Seconds(0.0) if work is None else work_seconds(kind, work)


def without_peak(kind: DeviceKind, call: OpCall) -> str:
    """The guess where a kind has no peak for the dtype that a call's matrix units compute in; empty without one."""
    dtype, product = _dtype(call), None
    with suppress(RuleError):
        product = product_of(_as_aten(call))
    if kind.has_peak(dtype) or op_class(call, product) not in ON_MATRIX_UNITS:
        return ""
    return f"{kind.name} has no peak for {dtype}: that of float32"


def work_seconds(kind: DeviceKind, work: CallWork) -> Seconds:
    """Seconds of a call with this work on a device of a kind."""
    return Seconds(
        kind.start + max(_computing(kind, work), _moving(kind, work.op_class, work.moved))
    )


def update_seconds(kind: DeviceKind, moved: Bytes) -> Seconds:
    """Seconds of an optimizer's update that reads and writes `moved` bytes."""
    return Seconds(kind.start + _moving(kind, "update", moved))


def work_of(call: OpCall) -> CallWork | None:
    """The work of a call; None for a view, which has none."""
    call = _as_aten(call)
    dtype = _dtype(call)
    if call.op in _HOST_COPIES:
        return CallWork(_HOST, dtype, Flops(0), Bytes(tensor_bytes(call.operands[0])))
    try:
        return _work(rule_of(call), call)
    except RuleError:
        tensors = (*call.operands, *(spec for spec in call.results if spec is not None))
        return CallWork(op_class(call), dtype, Flops(0), Bytes(sum(map(tensor_bytes, tensors))))


@lru_cache(maxsize=KNOWN_CALLS)
def _work(rule: Rule, call: OpCall) -> CallWork | None:
    if rule.view and rule.flops is None and rule.traffic is None:
        return None
    product = product_of(call)
    return CallWork(op_class(call, product), _dtype(call), flops(call), traffic(call), product)


def op_class(call: OpCall, product: Product | None = None) -> str:
    """The class of a call, one of `OP_CLASSES`."""
    found = next((cls for part, cls in _NAMED if part in call.op), None)
    return found or ("elementwise" if product is None else "product")


def product_of(call: OpCall) -> Product | None:
    """The sizes of a call's matrix product; None if no two of its operands share a contracted factor.

    Raises:
        RuleError: when the op has no rule.
    """
    if len(call.results) != 1:
        return None
    factors = rule_of(call).bind(call)
    slots = [
        frozenset(dims)
        for dims, spec in zip(factors.operands, slot_specs(call), strict=True)
        if "float" in spec.dtype and set(dims) & factors.contracted
    ]
    if len(slots) != 2 or not (slots[0] & slots[1] & factors.contracted):
        return None
    made = frozenset(factors.results[0])
    sizes = {name: max(found) for name, found in factor_sizes(call, factors).items()}

    def size(names: frozenset[str]) -> int:
        return prod(sizes[name] for name in names if name)

    left, right = slots
    return Product(
        size(left & right & made),
        size((left & made) - right),
        size((right & made) - left),
        size(left & right & factors.contracted),
    )


def _as_aten(call: OpCall) -> OpCall:
    own = WEFT_OPS.get(call.op)
    return replace(call, op=own.like) if own and own.like else call


def _moving(kind: DeviceKind, cls: str, moved: Bytes) -> float:
    if cls == _HOST:
        return moved / kind.host
    return moved / (kind.traffic * kind.efficiency[cls].traffic)


def _computing(kind: DeviceKind, work: CallWork) -> float:
    if work.op_class == _HOST:
        return 0.0
    dtype = work.dtype if work.op_class in ON_MATRIX_UNITS else "float32"
    efficiency, product = kind.efficiency[work.op_class], work.product
    rate = kind.peak(dtype) * efficiency.share(dtype)
    if product is None or work.op_class != "product":
        return work.flops / rate
    made = product.batch * product.rows * product.columns
    # Shares of tiles are at most 1, so no product is faster than its own elements.
    covered = min((_covered(kind.units, tile, product) for tile in kind.tiles), default=made)
    return 2 * covered * (product.depth + efficiency.depth) / rate if made else 0.0


def _covered(units: int, tile: Tile, product: Product) -> float:
    """Elements of the result that all units could have made while they made the product of these tiles."""
    tiles = product.batch * ceil(product.rows / tile.rows) * ceil(product.columns / tile.columns)
    return ceil(tiles / units) * units * tile.rows * tile.columns / tile.share


def _dtype(call: OpCall) -> str:
    """The dtype that a call computes in: that of its first operand of numbers with a point."""
    return next((spec.dtype for spec in call.operands if "float" in spec.dtype), "float32")
