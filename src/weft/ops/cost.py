"""Work of one call: floating-point operations and bytes of memory traffic."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from weft.ops.call import OpCall, TensorSpec, slot_specs
from weft.ops.factors import factor_sizes
from weft.ops.rule import KNOWN_CALLS, Rule, rule_of
from weft.units import ITEM_SIZE, Bytes, Flops


def flops(call: OpCall) -> Flops:
    """Floating-point operations of one call.

    A multiply and an add for each point of the iteration space where two operands share a
    contracted factor (matrix products, convolutions), none for views, otherwise one for each
    element of the largest tensor of numbers (truth values are none); rules may say more.

    Raises:
        RuleError: when the op has no rule.
    """
    return _flops(rule_of(call), call)


@lru_cache(maxsize=KNOWN_CALLS)
def _flops(rule: Rule, call: OpCall) -> Flops:
    if rule.flops is not None:
        return Flops(rule.flops(call))
    if rule.view:
        return Flops(0)
    factors = rule.bind(call)
    # Indices are not factors of a product: a table's gradient adds rows, it does not multiply them.
    carried = [
        name
        for dims, spec in zip(factors.operands, slot_specs(call), strict=True)
        for name in set(dims) & factors.contracted
        if "float" in spec.dtype or "complex" in spec.dtype
    ]
    if len(carried) > len(set(carried)):
        return Flops(2 * prod(max(sizes) for sizes in factor_sizes(call, factors).values()))
    numbers = (spec for spec in _tensors(call) if spec.dtype != "bool")
    return Flops(max((prod(spec.shape) for spec in numbers), default=0))


def traffic(call: OpCall) -> Bytes:
    """Bytes that one call reads and writes: all operands and results once, nothing for views; rules may say more.

    Raises:
        RuleError: when the op has no rule.
    """
    rule = rule_of(call)
    if rule.traffic is not None:
        return Bytes(rule.traffic(call))
    if rule.view:
        return Bytes(0)
    return Bytes(sum(tensor_bytes(spec) for spec in _tensors(call)))


def item(call: OpCall) -> int:
    """Bytes of an element of the numbers that a call computes with: its widest floating-point dtype, else 4."""
    floats = (spec.dtype for spec in _tensors(call) if "float" in spec.dtype)
    return max((ITEM_SIZE.get(dtype, 4) for dtype in floats), default=4)


def tensor_bytes(spec: TensorSpec) -> Bytes:
    """Bytes of one tensor; dtypes unknown to weft (such as uint64 seeds) count as 8 bytes an element."""
    return Bytes(prod(spec.shape) * ITEM_SIZE.get(spec.dtype, 8))


def _tensors(call: OpCall) -> tuple[TensorSpec, ...]:
    return call.operands + tuple(spec for spec in call.results if spec is not None)


# Bits of precision, and of the exponent.
_FLOATS = {"float16": (11, 5), "bfloat16": (8, 8), "float32": (24, 8), "float64": (53, 11)}
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_INTEGERS = (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_KNOWN = frozenset((*_FLOATS, *_PARTS, *_INTEGERS, "bool"))


def holds(wide: str, narrow: str) -> bool:
    """True if every value of the dtype `narrow` is one of `wide`."""
    if {wide, narrow} - _KNOWN:
        return wide == narrow
    if narrow in _PARTS:
        return wide in _PARTS and holds(_PARTS[wide], _PARTS[narrow])
    wide = _PARTS.get(wide, wide)
    if wide == narrow or narrow == "bool":
        return True
    if narrow in _FLOATS:
        return wide in _FLOATS and all(
            more >= less for more, less in zip(_FLOATS[wide], _FLOATS[narrow], strict=True)
        )
    if wide in _FLOATS:
        return _FLOATS[wide][0] >= _bits(narrow)
    return "int" in wide and _bits(wide) >= _bits(narrow) and _signed(wide) >= _signed(narrow)


def cast_is_lossless(source: str, target: str) -> bool:
    """True if the numbers that make up elements, real and imaginary parts, lose nothing by the cast."""
    return holds(_PARTS.get(target, target), _PARTS.get(source, source))


def is_integer(dtype: str) -> bool:
    """True if the dtype is one of integers."""
    return "int" in dtype


def _bits(integer: str) -> int:
    """Bits of the largest value; those of `int8` are 7."""
    return int(integer.strip("uint")) - _signed(integer)


def _signed(integer: str) -> bool:
    return not integer.startswith("u")


def dtype_name(dtype: object) -> str:
    """The name of a `torch.dtype`, without torch's prefix: "float32"."""
    return str(dtype).removeprefix("torch.")
