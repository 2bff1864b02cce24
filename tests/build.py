"""Parts of plans and local programs, for tests that write them by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from weft.ir.logical import Ref
from weft.ir.parse import parse_plan
from weft.ir.plan import LocalCall, LocalValue, Plan, RankPlan, Register


def value(name: str, *shape: int, dtype: str = "float32") -> LocalValue:
    """A value; without a shape it has four numbers."""
    return LocalValue(name, shape or (4,), dtype)


def value_of(tensor: torch.Tensor) -> LocalValue:
    """A value of a tensor's shape and dtype."""
    return value("t", *tensor.shape, dtype=str(tensor.dtype).removeprefix("torch."))


def call(
    op: str,
    args: Iterable[Any],
    *makes: LocalValue | str | None,
    shape: tuple[int, ...] = (4,),
    **kwargs: Any,
) -> LocalCall:
    """A call; `shape` is that of results that are given by name alone."""
    made = (value(x, *shape) if isinstance(x, str) else x for x in makes)
    return LocalCall.of(op, tuple(args), tuple(made), kwargs=tuple(kwargs.items()))


def refs(*names: str) -> tuple[Ref, ...]:
    """Arguments that are values."""
    return tuple(map(ref, names))


def ref(name: str, *shape: int, dtype: str = "float32") -> Ref:
    """An argument that is a value; without a shape it has four numbers."""
    return value(name, *shape, dtype=dtype).ref


def linked(plan: RankPlan) -> RankPlan:
    """The plan whose calls have the shapes of the registers and values that they read."""
    (found,) = parse_plan(str(Plan("linked", (), (plan,)))).ranks
    return found


def register(name: str, producer: int, *consumers: int, **fields: Any) -> Register:
    """A register of a value of four numbers, of the kind "activation" unless `fields` says otherwise."""
    return Register(value(name), fields.pop("kind", "activation"), producer, consumers, **fields)
