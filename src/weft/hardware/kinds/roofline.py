"""Seconds of calls on a device kind: a roofline whose roofs are the shares of the peaks that classes of ops reach.

Computing and reading go on at the same time, the slower of both counts (Williams, Waterman and Patterson, "Roofline",
CACM 2009). A matrix product is made of tiles, as many at a time as the device has units, so that its last wave may
be idle in part (NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave quantization); of
the kind's tiles the quickest counts. No call is quicker than the kind's peaks allow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod
from typing import final

from weft.errors import RuleError
from weft.hardware.kinds.device_kinds import ON_MATRIX_UNITS, DeviceKind, Tile
from weft.ops import OpCall, flops, traffic
from weft.ops.call import slot_specs
from weft.ops.cost import tensor_bytes
from weft.ops.factors import factor_sizes
from weft.ops.rule import KNOWN_CALLS, Rule, rule_of
from weft.ops.weft_ops import WEFT_OPS
from weft.units import Bytes, Flops, Seconds

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
        op_class: one of `weft.hardware.kinds.device_kind.OP_CLASSES`, or "host" for a copy to or from the host.
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
    dtype = _dtype(call)
    if kind.has_peak(dtype) or op_class(call, _product_or_none(call)) not in ON_MATRIX_UNITS:
        return ""
    return f"{kind.name} has no peak for {dtype}: that of float32"


def _product_or_none(call: OpCall) -> Product | None:
    try:
        return product_of(_as_aten(call))
    except RuleError:
        return None


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
    """The work of a call by its rule."""
    if rule.view and rule.flops is None and rule.traffic is None:
        return None
    product = product_of(call)
    return CallWork(op_class(call, product), _dtype(call), flops(call), traffic(call), product)


def op_class(call: OpCall, product: Product | None = None) -> str:
    """The class of a call, one of `weft.hardware.kinds.device_kind.OP_CLASSES`."""
    found = next((cls for part, cls in _NAMED if part in call.op), None)
    return found or ("elementwise" if product is None else "product")


def product_of(call: OpCall) -> Product | None:
    """The sizes of a call's matrix product; None where no two of its operands share a contracted factor.

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
    # Shares of tiles are at most 1, so no product is quicker than its own elements.
    covered = min((_covered(kind.units, tile, product) for tile in kind.tiles), default=made)
    return 2 * covered * (product.depth + efficiency.depth) / rate if made else 0.0


def _covered(units: int, tile: Tile, product: Product) -> float:
    """Elements of the result that all units could have made while they made the product of these tiles."""
    tiles = product.batch * ceil(product.rows / tile.rows) * ceil(product.columns / tile.columns)
    return ceil(tiles / units) * units * tile.rows * tile.columns / tile.share


def _dtype(call: OpCall) -> str:
    """The dtype that a call computes in: that of its first operand of numbers with a point."""
    return next((spec.dtype for spec in call.operands if "float" in spec.dtype), "float32")
