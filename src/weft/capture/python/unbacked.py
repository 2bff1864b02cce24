"""Numbers that a step reads from tensors and only returns, as in `{"loss": loss, "accuracy": right.mean().item()}`.

While a step is captured there is no number yet. `item()`, `torch.equal` and `torch.allclose` then return an
`UnbackedNumber`, which stands for a tensor of no dimensions, may be part of the step's result, and raises on any
other use. A truth test of it is that of the tensor, which may be a check (`weft.capture.python.assertions`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from weft.capture.fx.private import is_fake, is_known, stands_for
from weft.capture.fx.refusals import refuse_reading
from weft.errors import CaptureError

# Methods that objects need to be passed on, and the truth test, which is the tensor's.
_KEPT = {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__doc__"}
_KEPT |= {"__getattribute__", "__setattr__", "__delattr__", "__bool__"}


@final
class UnbackedNumber:
    """A number without a value during capture; the running step computes it.

    `isinstance` treats it as its future class, so that the user's code branches as with the number.
    """

    __slots__ = ("__weakref__", "_op", "_tensor")

    def __init__(self, tensor: Tensor, op: str) -> None:
        self._tensor = tensor
        self._op = op

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        dtype = self._tensor.dtype
        if dtype.is_complex:
            return complex
        return float if dtype.is_floating_point else bool if dtype == torch.bool else int

    def __bool__(self) -> bool:
        return bool(self._tensor)

    def __getattr__(self, name: str) -> Any:
        _refuse(self)


# Errors refused since a capture began; code around it, such as that of `logging`, may have caught it.
_refused: list[CaptureError] = []


def refuse_value(op: str) -> CaptureError:
    """The error for code that reads a value which there is not yet by `op`; it is raised though it may be caught."""
    _refused.append(refuse_reading(op))
    return _refused[-1]


def _refuse(number: UnbackedNumber, *_: object, **__: object) -> NoReturn:
    raise refuse_value(object.__getattribute__(number, "_op"))


@contextmanager
def all_refused() -> Iterator[None]:
    """Raise at the end what was refused to code that reads values, although it was caught, and has led elsewhere."""
    _refused.clear()
    try:
        yield
    except CaptureError as error:
        lines = [str(each).partition("\n")[0] for each in (error, *_refused[:1])]
        if len({*lines}) == 2:  # of one line, what came of it says more
            raise _refused[0] from error
        raise
    if _refused:
        raise _refused[0]


def forget_refused() -> None:
    """Let go what was refused to a run that counts for nothing."""
    _refused.clear()


for _name in {*dir(int), *dir(float), *dir(complex)} - _KEPT:
    setattr(UnbackedNumber, _name, property(_refuse) if _name[0] != "_" else _refuse)


def is_unbacked(value: Any) -> bool:
    """True if a value is a number that there is once the step runs."""
    return type(value) is UnbackedNumber


def tensor_of(number: Any) -> Tensor:
    """The tensor of no dimensions that a `UnbackedNumber` stands for."""
    found: Tensor = number._tensor
    return found


# Functions that give such numbers, by those that they stand for.
TABLE: dict[Any, Callable[..., Any]] = {}
_noted: list[weakref.ref[UnbackedNumber]] = []


def forget_numbers() -> None:
    """Begin to note those that are made again."""
    _noted.clear()


def living_numbers() -> list[UnbackedNumber]:
    """The noted ones that somebody holds."""
    return [each for each in (ref() for ref in _noted) if each is not None]


def _later(tensor: Tensor, op: str) -> UnbackedNumber:
    # A copy, as the tensor may be written before the step ends.
    number = UnbackedNumber(tensor.detach().reshape(()).clone(), op)
    _noted.append(weakref.ref(number))
    return number


@stands_for(TABLE, Tensor.item)
def _item(self: Tensor) -> Any:
    if self.numel() != 1 or is_known(self):
        return NotImplemented
    return _later(self, "aten._local_scalar_dense.default")


@stands_for(TABLE, Tensor.equal, torch.equal)
def _equal(input: Tensor, other: Tensor) -> Any:
    if input.dtype != other.dtype or _both_real(input, other):
        return NotImplemented
    if input.shape != other.shape:
        return False
    return _later((input == other).all(), "aten.equal.default")


@stands_for(TABLE, Tensor.allclose, torch.allclose)
def _allclose(
    input: Tensor,
    other: Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> Any:
    if _both_real(input, other):
        return NotImplemented
    close = torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return _later(close.all(), "aten.allclose.default")


def _both_real(one: Tensor, other: Tensor) -> bool:
    """True if the values of both are there, as of tensors from outside."""
    return not is_fake(one) and not is_fake(other)
