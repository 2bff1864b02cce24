"""The fields of a strategy beside patterns, layouts and numbers: stages, shards, orders of work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from weft.errors import StrategyError, shown
from weft.layout import Placement
from weft.patterns import name_patterns

Schedule: TypeAlias = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@final
@dataclass(frozen=True)
class Stage:
    """A part of the model and the ranks that run it.

    Attributes:
        patterns: of module paths ("embed", "blocks.[0-3].*"); a module's stage is also that of all
            modules and parameters below it. Parameters' own names may be given too
            (docs/patterns.md).
        placement: where this part runs.
    """

    patterns: tuple[str, ...]
    placement: Placement

    def __init__(self, patterns: Iterable[str], placement: Placement) -> None:
        hold(self, patterns=name_patterns("weft.Stage(…)", patterns), placement=placement)
        if not isinstance(placement, Placement):
            raise StrategyError(
                f"weft.Stage({list(self.patterns)}, placement=…) takes a weft.placement, found {placement!r}"
            )


@final
@dataclass(frozen=True)
class Zero:
    """Optimizer states (level 1), gradients too (2), parameters too (3) are sharded along an axis.

    The levels are those of ZeRO (Rajbhandari et al. 2020, section 5).

    Attributes:
        level: 1, 2 or 3.
        axis: of the placement.
    """

    level: Literal[1, 2, 3]
    axis: int = 0

    def __post_init__(self) -> None:
        if type(self.level) is not int or self.level not in (1, 2, 3):
            raise StrategyError(f"weft.Zero(level=…) takes 1, 2 or 3, found {shown(self.level)}")
        if not isinstance(self.axis, int) or isinstance(self.axis, bool) or self.axis < 0:
            raise StrategyError(
                f"weft.Zero(axis=…) takes the number of an axis of the placement, found {shown(self.axis)}"
            )


def hold(instance: object, **values: object) -> None:
    """Set fields of a frozen dataclass to their normal form; in its `__init__` or `__post_init__`, nowhere else."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)
