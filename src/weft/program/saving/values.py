"""Python's values as JSON, from which they come back as they were; nothing of it is ever executed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.errors import UNREADABLE, DamagedCheckpoint, UserError
from weft.program.saving.plain_tensors import check_plain
from weft.tensor import GlobalTensor

# Marks a dict that stands for a value that JSON has not.
_KIND = "__weft__"
_MOST_DEEP = 64
# Bits of whole numbers: Python reads no longer ones from a text.
_MOST_BITS = 14_000
# Of a number of numpy that Python's hold as it is.
_MOST_BYTES = 8
_DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}


def to_json(value: Any, where: str, tensors: dict[str, Tensor], deep: int = 0) -> Any:
    """A value as what JSON has; tensors in it go into `tensors`, each under a name of its own.

    Args:
        value: None, truth values, numbers, texts, bytes, plain and global tensors, and lists, tuples, sets and dicts
            of these; numpy's numbers come back as Python's.
        where: it stands, for errors and names.
        tensors: that were met.

    Raises:
        UserError: naming what is none of these, and tensors that are not plain.
    """
    if deep > _MOST_DEEP:
        raise UserError(
            f"{where} is nested more than {_MOST_DEEP} deep; a checkpoint takes no deeper"
        )

    def inner(each: Any, name: object) -> Any:
        return to_json(each, f"{where}.{name}", tensors, deep + 1)

    match value:
        case Tensor():
            check_plain(value, where)
            root, _, path = where.partition(".")
            # Global tensors have the same name whatever other tensors a process has.
            laid = isinstance(value, GlobalTensor)
            name = f"{root}.laid.{path}" if laid else f"{root}.{len(tensors)}"
            while name in tensors:
                name += "_"
            tensors[name] = value
            return {_KIND: "tensor", "name": name}
        case list():
            return [inner(each, number) for number, each in enumerate(value)]
        case tuple() | set() | frozenset():
            kind = "tuple" if isinstance(value, tuple) else type(value).__name__
            # Texts have another order in the set of each process.
            every = value if kind == "tuple" else sorted(value, key=repr)
            return {_KIND: kind, "value": [inner(each, i) for i, each in enumerate(every)]}
        case dict() if all(type(key) is str for key in value) and _KIND not in value:
            return {key: inner(each, key) for key, each in value.items()}
        case dict():
            pairs = [[inner(key, "key"), inner(each, key)] for key, each in value.items()]
            return {_KIND: "dict", "value": pairs}
    return _single(value, where)


def _single(value: Any, where: str) -> Any:
    """A value that holds no other."""
    match value:
        case None | bool() | str():
            return value
        case int() if int(value).bit_length() <= _MOST_BITS:
            return int(value)
        case int():
            raise UserError(
                f"{where} is a number of {int(value).bit_length()} bits; a checkpoint takes whole numbers of at most "
                f"{_MOST_BITS}: give it as text, or as bytes"
            )
        case float():
            return (
                float(value)
                if math.isfinite(value)
                else {_KIND: "float", "value": repr(float(value))}
            )
        case np.bool_() | np.integer():
            return value.item()
        case np.floating() if value.dtype.itemsize <= _MOST_BYTES:
            return _single(value.item(), where)
        case complex():
            return {_KIND: "complex", "value": [repr(value.real), repr(value.imag)]}
        case bytes():
            return {_KIND: "bytes", "value": value.hex()}
        case torch.dtype():
            return {_KIND: "dtype", "value": str(value).removeprefix("torch.")}
    raise UserError(
        f"{where} is a {type(value).__name__}; a checkpoint takes numbers, texts, tensors, and lists and dicts of "
        "them, or an object with state_dict() and load_state_dict()"
    )


def from_json(value: Any, where: str, tensors: dict[str, Tensor], deep: int = 0) -> Any:
    """The value that `to_json` was given.

    Raises:
        UserError: naming what is none that it makes.
    """
    if deep > 2 * _MOST_DEEP:
        raise DamagedCheckpoint(
            f"{where} is damaged: it is nested too deep; load another checkpoint"
        )

    def inner(each: Any, name: object) -> Any:
        return from_json(each, f"{where}.{name}", tensors, deep + 1)

    if isinstance(value, list):
        return [inner(each, number) for number, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: inner(each, key) for key, each in value.items()}
    try:
        return _special(value, inner, tensors)
    except UNREADABLE as error:
        raise DamagedCheckpoint(f"{where} is damaged: {type(error).__name__}: {error}") from None


def _special(value: dict[str, Any], inner: Any, tensors: dict[str, Tensor]) -> Any:
    content = value.get("value")
    match value[_KIND]:
        case "float":
            return float(content)  # type: ignore[arg-type]
        case "complex":
            real, imaginary = content  # type: ignore[misc]
            return complex(float(real), float(imaginary))
        case "bytes":
            return bytes.fromhex(content)  # type: ignore[arg-type]
        case "tensor":
            return tensors[value["name"]]
        case "dtype":
            return _DTYPES[content]  # type: ignore[index]
        case "tuple" | "set" | "frozenset" as kind:
            every = [inner(each, number) for number, each in enumerate(content)]  # type: ignore[arg-type]
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](every)
        case "dict":
            return {inner(key, "key"): inner(each, key) for key, each in content}  # type: ignore[union-attr]
    raise ValueError(f"no kind {value[_KIND]!r}")
