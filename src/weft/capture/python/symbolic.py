"""Python numbers that change between steps, such as those of a schedule: inputs of the step, so that a new value needs
no new plan.

While a step is captured, a `SymbolicNumber` stands for such a number. Arithmetic with other numbers
gives another `SymbolicNumber`; with a tensor it acts as a 0-dim tensor, which is written before every step. All other
uses run on the number itself, and their result is compared before every step: if it differs, the step is planned again.

They also replace counters in a second trace of a step that changes them: the step may count, but not read the count.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from weft.capture.fx.private import is_fake
from weft.capture.python_guards import BitwiseEqual, Guard, question_guard
from weft.capture.tree import Shut

_DTYPES = (torch.float32, torch.float64)
_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
}
_COUNTED = tuple(_SIGNS)
_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_READ = "divmod rdivmod hash str repr format float int index round trunc floor ceil reduce_ex"
_TEXTS = ("__str__", "__repr__", "__format__")
_RAISING = ("truediv", "floordiv", "mod", "pow")
# Numbers of these types can be followed; numpy's is a `float`.
_TYPES = (int, float, np.float64)
# Functions of torch that take a tensor of no dimensions in place of a number, and give the same.
_METHODS = ("add", "sub", "mul", "div", "true_divide", "subtract", "multiply", "divide")
_FOLLOWED = {
    *(getattr(Tensor, name + end) for name in _METHODS for end in ("", "_")),
    *(getattr(torch, name) for name in _METHODS),
    *(getattr(Tensor, f"__{side}{name}__") for name in _COUNTED[:4] for side in ("", "r", "i")),
    *(Tensor.__rdiv__, Tensor.__div__, Tensor.__idiv__, torch.rsub),
    *(getattr(Tensor, f"__{name}__") for name in _COMPARED),
    *(getattr(torch, name) for name in _COMPARED),
    *(getattr(Tensor, name) for name in _COMPARED),
}


class SymbolicNumber(Shut):
    """A Python number whose value may change between steps: an input of the graph, not a constant.

    Python takes it for one of its class (`isinstance`).
    """

    def __init__(self, numbers: SymbolicNumbers, compute: Callable[[], Any], text: str) -> None:
        self._all = numbers
        self._compute = compute
        self._text = text

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._compute())

    def __getattr__(self, name: str) -> Any:
        kind = type(self._compute())
        if not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return getattr(_itself(self), name)

    def __bool__(self) -> bool:
        return bool(self._all.outcome(lambda: bool(self._compute()), f"bool({self._text})"))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})


@final
class SymbolicLeaf(SymbolicNumber):
    """A text or container in the batch, of which later batches have others."""

    def __len__(self) -> int:
        return int(self._all.outcome(lambda: len(self._compute()), f"the length of {self._text}"))

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._compute(), dict):
            return iter(_itself(self))
        return (self[place] for place in range(len(self)))

    def __contains__(self, item: Any) -> bool:
        return item in _itself(self)

    def __getitem__(self, key: Any) -> Any:
        compute = lambda: self._compute()[number_now(key)]  # noqa: E731
        return self._all.part(compute, f"{self._text}[{_name(key)}]")


@final
class SymbolicNumbers:
    """The changing numbers of one capture, and the batch entries without a tensor.

    Args:
        entries: where the user keeps them, and what they are now.
        leaves: those of the batch.
        counting: for a run that shows whether they are read: they may be counted on and shown as texts, and whatever
            else is done with them is an outcome.

    Attributes:
        outcomes: uses other than arithmetic, and their results.
        tensors: that stand for the numbers, and how to compute each.
    """

    def __init__(
        self, entries: Sequence[Guard], leaves: Iterable[Guard] = (), counting: bool = False
    ) -> None:
        of_batch = {each.key: each for each in leaves if _class_of(each.value) is not None}
        followed = (each for each in entries if can_follow(each) and each.key not in of_batch)
        self.entries = (*followed, *of_batch.values())
        self.counting = counting
        self.outcomes: list[Guard] = []
        self.tensors: dict[int, tuple[Tensor, SymbolicNumber]] = {}
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Within the context, symbols take the places of the user's numbers."""
        for entry in self.entries:
            place = _Place(entry)
            number = (_class_of(entry.value) or SymbolicNumber)(self, place.value, entry.text)
            if not self.counting:
                self.outcomes.append(question_guard(None, place.kind, f"the type of {entry.text}"))
            entry.put(number)
        try:
            yield
        finally:
            for entry in self.entries:
                if entry.replaceable:  # a deque may have become shorter
                    entry.put(entry.value)

    def outcome(self, compute: Callable[[], Any], text: str) -> Any:
        """The result of `compute`, which every step compares: for another one the step is planned again."""
        self.outcomes.append(question_guard(None, compute, text))
        return self.outcomes[-1].value

    def part(self, compute: Callable[[], Any], text: str) -> Any:
        """An entry of a leaf; what is not a number, text or container every step compares."""
        kind = _class_of(compute())
        if kind is None:
            return self.outcome(compute, text)
        self.outcome(lambda: type(compute()).__name__, f"the type of {text}")
        return kind(self, compute, text)

    def positions(self, constants: Sequence[Tensor]) -> dict[int, SymbolicNumber]:
        """The numbers that some of the constants of a graph stand for, by their positions."""
        known = self.tensors
        return {i: known[id(each)][1] for i, each in enumerate(constants) if id(each) in known}

    def tensor(self, number: SymbolicNumber, dtype: torch.dtype) -> Tensor:
        """A tensor [] on the CPU that stands for a number."""
        key = id(number), dtype
        if key not in self._made:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                made = torch.tensor(number._compute(), dtype=dtype)
            self._made[key] = made
            self.tensors[id(made)] = made, number
        return self._made[key]


@final
class CountedWithTensors(TorchFunctionMode):
    """Within the context, functions of torch take changing numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def counting_on(changes: Iterable[Guard]) -> SymbolicNumbers:
    """The symbolic numbers after the step has changed them, from a second run of the step."""
    now = (replace(each, value=each.value_now) for each in changes if type(each.value) in _TYPES)
    return SymbolicNumbers(list(now), counting=True)


def is_symbolic(value: Any) -> bool:
    """True if a value stands for a number or leaf that changes."""
    return issubclass(type(value), SymbolicNumber)


def number_now(value: Any) -> Any:
    """The number as it is at present that a changing number stands for; others as they are."""
    return value._compute() if is_symbolic(value) else value


def plain_number(number: SymbolicNumber) -> int | float:
    """The present number as one of Python, as torch takes those of numpy."""
    value = number._compute()
    return float(value) if isinstance(value, float) else int(value)


def number_text(number: SymbolicNumber) -> str:
    """The user's name of a number."""
    return number._text


@final
class _Place:
    """A place in which the user keeps a number; while a step is captured, the number of before stands for it."""

    def __init__(self, entry: Guard) -> None:
        self._entry = entry

    def value(self) -> Any:
        now = self._entry.value_now
        return self._entry.value if is_symbolic(now) else now

    def kind(self) -> str:
        return type(self.value()).__name__


def _class_of(value: Any) -> type[SymbolicNumber] | None:
    """The class that stands for an entry of the batch."""
    if type(value) in _TYPES:
        return SymbolicNumber if math.isfinite(value) else None
    return SymbolicLeaf if type(value) in (str, bytes, list, tuple, dict) else None


def can_follow(entry: Guard) -> bool:
    """True if the guarded value is a finite number and its place can hold a symbolic one instead."""
    return type(entry.value) in _TYPES and math.isfinite(entry.value) and entry.replaceable


def _itself(number: SymbolicNumber) -> Any:
    """The number, of which from now on every step must have the same."""
    return number._all.outcome(lambda: BitwiseEqual(number._compute()), number._text).number


def _call(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch with numbers that change: as tensors, where it computes the same with these."""
    if func in _FOLLOWED and len(args) == 2 and not kwargs:
        tensor = next((each for each in args if isinstance(each, Tensor)), None)
        if tensor is not None and is_fake(tensor) and tensor.dtype in _DTYPES:
            return func(
                *(
                    (each._all.tensor(each, tensor.dtype) if is_symbolic(each) else each)
                    for each in args
                )
            )
    if isinstance(func, FunctionType):  # of Python, which may count with them
        try:
            return func(*args, **kwargs)
        except TypeError:
            pass  # something in it takes numbers only
    itself = lambda leaf: _itself(leaf) if is_symbolic(leaf) else leaf  # noqa: E731
    return func(*tree_map(itself, args), **tree_map(itself, dict(kwargs)))


def _counts(name: str, turned: bool) -> Callable[[SymbolicNumber, Any], Any]:
    apply, sign = getattr(operator, name), _SIGNS[name]
    # For a tensor: what torch does with a number on its left.
    reflected: Any = getattr(Tensor, f"__r{name}__")

    def count(self: SymbolicNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return (apply if turned else reflected)(other, self)
        if type(self) is not SymbolicNumber or type(other) not in (*_TYPES, bool, SymbolicNumber):
            return apply(other, _itself(self)) if turned else apply(_itself(self), other)
        left, right = (other, self) if turned else (self, other)
        text = f"({_name(left)} {sign} {_name(right)})"
        compute: Any = lambda: apply(number_now(left), number_now(right))  # noqa: E731
        if (
            name in _RAISING and not self._all.counting
        ):  # where it will, the user's own code is to run
            self._all.outcome(lambda: _raises(compute), f"an error in {text}")
        if type(compute()) not in _TYPES:  # (-1) ** 0.5
            return self._all.outcome(compute, text)
        return SymbolicNumber(self._all, compute, text)

    return count


def _compares(name: str) -> Callable[[SymbolicNumber, Any], Any]:
    apply = getattr(operator, name)

    def compare(self: SymbolicNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return getattr(operator, _TURNED.get(name, name))(other, self)
        if not is_symbolic(other) and type(other) not in (*_TYPES, bool, str):
            return apply(_itself(self), other)
        compute = lambda: apply(number_now(self), number_now(other))  # noqa: E731
        return self._all.outcome(compute, f"{self._text} {_COMPARED[name]} {_name(other)}")

    return compare


def _signs(apply: Callable[[Any], Any], text: str) -> Callable[[SymbolicNumber], Any]:
    def sign(self: SymbolicNumber) -> Any:
        compute = lambda: apply(self._compute())  # noqa: E731
        return SymbolicNumber(self._all, compute, text.format(self._text))

    return sign


def _raises(compute: Callable[[], Any]) -> bool:
    try:
        compute()
    except ArithmeticError:
        return True
    return False


def _reads(name: str) -> Callable[..., Any]:
    def read(self: SymbolicNumber, *args: Any) -> Any:
        shown = self._all.counting and name in _TEXTS
        return getattr(self._compute() if shown else _itself(self), name)(*args)

    return read


def _name(value: Any) -> str:
    return number_text(value) if is_symbolic(value) else repr(value)


for _each in _COUNTED:
    setattr(SymbolicNumber, f"__{_each}__", _counts(_each, turned=False))
    setattr(SymbolicNumber, f"__r{_each}__", _counts(_each, turned=True))
for _each in _COMPARED:
    setattr(SymbolicNumber, f"__{_each}__", _compares(_each))
for _each in _READ.split():
    setattr(SymbolicNumber, f"__{_each}__", _reads(f"__{_each}__"))
for _each, _apply, _text in (
    ("neg", operator.neg, "(-{})"),
    ("pos", operator.pos, "{}"),
    ("abs", abs, "abs({})"),
):
    setattr(SymbolicNumber, f"__{_each}__", _signs(_apply, _text))
