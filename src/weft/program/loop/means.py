"""Means of the numbers that steps return, for which nothing is waited before they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor


@final
class Means:
    """The mean of each number that steps have returned since it was last asked for."""

    def __init__(self) -> None:
        # Sums, which may be on a device, and how many are in them.
        self._sums: dict[str, tuple[Any, int]] = {}

    def add(self, result: Any) -> None:
        """Add what a step has returned: a loss, alone or first, or numbers by name."""
        for name, number in _numbers(result):
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + number.detach().double(), count + 1

    def taken(self) -> dict[str, float]:
        """The means by name; from here on others begin."""
        sums, self._sums = self._sums, {}
        return {name: total.item() / count for name, (total, count) in sums.items()}


def _numbers(result: Any) -> Iterator[tuple[str, Tensor]]:
    while isinstance(result, Sequence) and result and not isinstance(result, str):
        result = result[0]
    named = result if isinstance(result, Mapping) else {"loss": result}
    for name, x in named.items():
        if isinstance(x, Tensor) and x.numel() == 1 and not x.is_complex():
            yield str(name), x
