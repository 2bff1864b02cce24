"""The optimizers of one step, and their parameter groups under one number each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch

from weft.errors import wrong


@final
@dataclass(frozen=True)
class Optimizers:
    """The user's optimizers, in the order in which they were given; none in evaluation.

    Groups are numbered across all optimizers: group `n` of optimizer `i` of `k` has the number
    `n * k + i`, so that a new group renumbers no other.
    """

    each: tuple[torch.optim.Optimizer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.each)

    def number(self, optimizer: int, group: int) -> int:
        """The number of a group of one of them."""
        return group * len(self.each) + optimizer

    def place(self, number: int) -> tuple[torch.optim.Optimizer, int]:
        """The optimizer of a group, and which of its groups it is."""
        group, optimizer = divmod(number, len(self.each))
        return self.each[optimizer], group

    def groups(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Every group as it is now: its name, its number, and its entries."""
        for i, optimizer in enumerate(self.each):
            for n, group in enumerate(optimizer.param_groups):
                yield f"parameter group {n} of {self.name(i)}", self.number(i, n), group

    def name(self, optimizer: int) -> str:
        """The class of one of them; with its place where there are several."""
        name = type(self.each[optimizer]).__name__
        return name if len(self.each) == 1 else f"optimizer {optimizer} ({name})"


# The optimizers that users pass.
Optimizing: TypeAlias = Optimizers | torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def optimizers_of(given: Optimizing) -> Optimizers:
    """The optimizers that were given: one, or a list or tuple of them; None for none.

    Raises:
        UserError: when it is something else.
    """
    if isinstance(given, Optimizers):
        return given
    if given is None:
        return Optimizers()
    every = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not every or not all(isinstance(one, torch.optim.Optimizer) for one in every):
        expected = "a torch.optim.Optimizer, a list of several that share no parameter, or None for an evaluation step"
        raise wrong("optimizer=", expected, given)
    return Optimizers(every)
