"""A move of the local search: a pure function from strategy to strategy, with a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from weft.strategy.strategy import Strategy


@final
@dataclass(frozen=True)
class StrategyMove:
    """A small change of a strategy.

    Attributes:
        name: what differs then, in words.
        on: the strategy with the change; one that has it already stays as it is.
    """

    name: str
    on: Callable[[Strategy], Strategy]
