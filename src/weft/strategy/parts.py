"""The fields of a strategy beside patterns, layouts and numbers: stages, orders of work, shards as of ZeRO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from weft.errors import StrategyError, wrong
from weft.layout import Placement
from weft.patterns import check_named, first_match, name_patterns

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
            expected = "a weft.placement"
            raise wrong(
                f"weft.Stage({list(self.patterns)}, placement=…)",
                expected,
                placement,
                StrategyError,
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
            raise wrong("weft.Zero(level=…)", "1, 2 or 3", self.level, StrategyError)
        if not isinstance(self.axis, int) or isinstance(self.axis, bool) or self.axis < 0:
            expected = "the number of an axis of the placement"
            raise wrong("weft.Zero(axis=…)", expected, self.axis, StrategyError)


def hold(instance: object, **values: object) -> None:
    """Set fields of a frozen dataclass to their normal form; in its `__init__` or `__post_init__`, nowhere else."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


# As users write it: for all parameters, or by patterns of which the first that matches counts; None leaves whole.
Zeros: TypeAlias = Zero | Mapping[str, Zero | None]
# As passes are told it: the order of patterns counts, also where two are compared.
ZeroRules: TypeAlias = tuple[tuple[str, Zero | None], ...]


def zero_rules(zero: Zeros | ZeroRules | None) -> ZeroRules:
    """Patterns in their order; one `Zero` stands for all names."""
    if zero is None:
        return ()
    if isinstance(zero, Zero):
        return (("*", zero),)
    return zero if isinstance(zero, tuple) else tuple(zero.items())


def zero_of(rules: ZeroRules, key: str) -> Zero | None:
    """The `Zero` of a parameter, by the first pattern that matches its name; None if it stays whole."""
    given = dict(rules)
    chosen = first_match(given, key)
    return given[chosen] if chosen is not None else None


def level_of(rules: ZeroRules, key: str) -> int:
    """The level of a parameter; 0 if it stays whole."""
    found = zero_of(rules, key)
    return found.level if found is not None else 0


def highest_level(zero: Zeros | ZeroRules | None) -> int:
    """The highest level of any pattern; 0 if nothing is sharded."""
    return max((each.level for _, each in zero_rules(zero) if each is not None), default=0)


def zero_axis(zero: Zeros | ZeroRules | None) -> int | None:
    """The axis of the shards; None if nothing is sharded."""
    return next((each.axis for _, each in zero_rules(zero) if each is not None), None)


def check_zero_patterns(rules: ZeroRules, parameters: Iterable[str]) -> None:
    """Refuse a pattern that names no parameter.

    Raises:
        StrategyError: with the names that come close.
    """
    names = tuple(parameters)
    for pattern, _ in rules:
        check_named(f"zero={{{pattern!r}: …}}", pattern, names, "parameters")


def checked_zero(name: str, value: object) -> Zeros | None:
    """The field as a strategy holds it.

    Raises:
        StrategyError: it is something else, or patterns shard along several axes.
    """
    if value is None or isinstance(value, Zero):
        return value
    if not isinstance(value, Mapping) or not all(map(_is_rule, value.items())):
        expected = (
            "weft.Zero(level, axis), None, or a mapping from patterns of parameters to these such as "
            '{"*.bias": None, "*": weft.Zero(3)}'
        )
        raise wrong(name, expected, value, StrategyError)
    axes = sorted({each.axis for each in value.values() if each is not None})
    if len(axes) > 1:
        raise StrategyError(
            f"{name} shards all parameters along one axis, got axes {', '.join(map(str, axes))} in {value!r}; give "
            "each weft.Zero of the mapping the same axis"
        )
    return dict(value) or None


def _is_rule(item: tuple[object, object]) -> bool:
    pattern, zero = item
    return isinstance(pattern, str) and (zero is None or isinstance(zero, Zero))
