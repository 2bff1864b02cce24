"""Dtypes by name: that of torch's, and which hold every value of another one, so that a conversion loses nothing."""

from __future__ import annotations

# Bits of precision, and of the exponent.
_FLOATS = {"float16": (11, 5), "bfloat16": (8, 8), "float32": (24, 8), "float64": (53, 11)}
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_INTEGERS = (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_KNOWN = frozenset((*_FLOATS, *_PARTS, *_INTEGERS, "bool"))


def holds(wide: str, narrow: str) -> bool:
    """True where every value of the dtype `narrow` is one of `wide`."""
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


def keeps(made: str, given: str) -> bool:
    """True where the numbers that make up elements, real and imaginary parts, lose nothing from `given` to `made`."""
    return holds(_PARTS.get(made, made), _PARTS.get(given, given))


def is_integer(dtype: str) -> bool:
    """True where the dtype is one of integers."""
    return "int" in dtype


def _bits(integer: str) -> int:
    """Bits of the largest value; those of `int8` are 7."""
    return int(integer.strip("uint")) - _signed(integer)


def _signed(integer: str) -> bool:
    return not integer.startswith("u")


def dtype_name(dtype: object) -> str:
    """The name of a `torch.dtype`, without torch's prefix: "float32"."""
    return str(dtype).removeprefix("torch.")
