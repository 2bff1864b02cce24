"""The field `zero` of a strategy: one `Zero` for all parameters, or one for each pattern of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from weft.errors import StrategyError
from weft.patterns import check_named, first_match
from weft.strategy.parts import Zero

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
    """The `Zero` of a parameter, by the first pattern that matches its name; None where it stays whole."""
    given = dict(rules)
    chosen = first_match(given, key)
    return given[chosen] if chosen is not None else None


def level_of(rules: ZeroRules, key: str) -> int:
    """The level of a parameter; 0 where it stays whole."""
    found = zero_of(rules, key)
    return found.level if found is not None else 0


def highest_level(zero: Zeros | ZeroRules | None) -> int:
    """The highest level of any pattern; 0 where nothing is sharded."""
    return max((each.level for _, each in zero_rules(zero) if each is not None), default=0)


def zero_axis(zero: Zeros | ZeroRules | None) -> int | None:
    """The axis of the shards; None where nothing is sharded."""
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
        raise StrategyError(
            f"{name}= takes weft.Zero(level, axis), None, or a mapping from patterns of parameters to these such as "
            f'{{"*.bias": None, "*": weft.Zero(3)}}, found {value!r}'
        )
    axes = sorted({each.axis for each in value.values() if each is not None})
    if len(axes) > 1:
        raise StrategyError(
            f"{name}= shards all parameters along one axis, found axes {', '.join(map(str, axes))} in {value!r}; give "
            "each weft.Zero of the mapping the same axis"
        )
    return dict(value) or None


def _is_rule(item: tuple[object, object]) -> bool:
    pattern, zero = item
    return isinstance(pattern, str) and (zero is None or isinstance(zero, Zero))
