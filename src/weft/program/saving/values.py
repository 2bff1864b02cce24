"""Python's values as JSON, from which they come back as they were; nothing of it is ever executed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from weft.errors import UNREADABLE, DamagedCheckpoint, UserError
from weft.layout import Partial
from weft.ops.cost import dtype_name
from weft.program.saving.manifest import DTYPES
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


def check_plain(tensor: Tensor, where: str) -> None:
    """Refuse a tensor that no file of a checkpoint can hold as it is.

    Args:
        tensor: an extra.
        where: it stands, for the error.

    Raises:
        UserError: saying what it is, and what would do.
    """
    why = _why_not(tensor)
    if why:
        raise UserError(
            f"{where} is {why[0]}; a checkpoint takes dense tensors with values: {why[1]}"
        )


def _why_not(tensor: Tensor) -> tuple[str, str] | None:
    """The kind of a tensor that cannot be saved, and what would do; None for one that can."""
    if isinstance(tensor, GlobalTensor):
        return _why_not_global(tensor)
    if isinstance(tensor, DTensor):
        return f"a DTensor of shape {list(tensor.shape)}", "give tensor.full_tensor()"
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "a parameter without a shape", "run its lazy module once before"
    if tensor.is_nested:
        return "a nested tensor", "give the list of its parts, tensor.unbind()"
    return _without_plain_values(tensor)


def _why_not_global(tensor: GlobalTensor) -> tuple[str, str] | None:
    """The same of a global tensor."""
    kind = f"a global tensor of shape {list(tensor.shape)}"
    if any(isinstance(sbp, Partial) for sbp in tensor.sbp):
        return f"{kind}, of whose parts the sum is Partial", "give tensor.full()"
    if dtype_name(tensor.dtype) not in DTYPES.values():
        return f"{kind} of {tensor.dtype}, which safetensors has not", "give it as another dtype"
    return None


def _without_plain_values(tensor: Tensor) -> tuple[str, str] | None:
    """The same of a tensor with a shape."""
    kind = f"of shape {list(tensor.shape)}"
    if tensor.is_meta:
        return f"a tensor {kind} on the meta device, without values", "give one with values"
    if tensor.is_quantized:
        return f"a quantized tensor {kind}", "give tensor.dequantize(), or its int_repr() and scale"
    if str(tensor.layout) != "torch.strided":
        layout = str(tensor.layout).removeprefix("torch.")
        return f"a tensor {kind} of layout {layout}", "give tensor.to_dense()"
    if any(getattr(tensor, "names", ())):
        return f"a tensor {kind} with named dimensions", "give tensor.rename(None)"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        # Its values are elsewhere, or nowhere.
        return f"a tensor {kind} of the class {type(tensor).__name__}", "give a plain torch.Tensor"
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES.values():
        return (
            f"a tensor {kind} of {tensor.dtype}, which safetensors has not",
            "give it as another dtype, as by torch.view_as_real",
        )
    return None
