"""Checks of the fields of a strategy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from weft.errors import LayoutError, StrategyError, shown
from weft.layout import Broadcast, Partial, Split
from weft.patterns import name_patterns
from weft.strategy.parts import SCHEDULES, Stage
from weft.strategy.precision import short_form
from weft.strategy.sharding import checked_zero
from weft.strategy.text import SBPs, signature_sides

# Stages and micro-batches, at most; far above any that a machine has.
MOST = 1 << 16

# Returns the value as the strategy holds it, or raises StrategyError.
Check: TypeAlias = Callable[[str, Any], Any]


def checked(name: str, value: Any) -> Any:
    """The field `name` of a strategy, as it is held.

    Raises:
        StrategyError: naming the field, what it takes and what was found.
    """
    return _CHECKS[name](name, value)


def _layouts(name: str, patterns: Any) -> dict[str, SBPs]:
    if not isinstance(patterns, Mapping):
        raise StrategyError(
            f"{name}= takes a mapping from name patterns to SBPs, found {shown(patterns)}"
        )
    return {pattern: _sbps(name, pattern, sbp) for pattern, sbp in patterns.items()}


def _sbps(name: str, pattern: object, sbp: object) -> SBPs:
    if not isinstance(pattern, str):
        raise StrategyError(f"{name}= takes names as keys, found {shown(pattern)}")
    if isinstance(sbp, Split | Broadcast | Partial):
        return sbp
    parts = tuple(sbp) if isinstance(sbp, list | tuple) else ()
    if not parts or not all(isinstance(part, Split | Broadcast | Partial) for part in parts):
        raise StrategyError(
            f"{name}={{{pattern!r}: …}} takes weft.split(dim), weft.broadcast or a tuple of them "
            f"with one entry for each axis of the placement, found {shown(sbp)}"
        )
    return parts


def _stages(name: str, value: Any) -> tuple[Stage, ...] | int:
    if _is_count(value):
        return _count(name, value)
    stages = tuple(value) if isinstance(value, list | tuple) else (None,)
    if not all(isinstance(stage, Stage) for stage in stages):
        raise StrategyError(
            f"{name}= takes a number of stages, or a list of weft.Stage(patterns, placement=…), found {shown(value)}"
        )
    return stages


def _count(name: str, value: Any) -> int:
    if not _is_count(value):
        raise StrategyError(f"{name}= takes a whole number from 1, found {shown(value)}")
    if value > MOST:
        raise StrategyError(f"{name}= takes a whole number up to {MOST}, found {shown(value)}")
    return int(value)


def _limit(name: str, value: Any) -> int | None:
    if value is None or _is_count(value):
        return None if value is None else int(value)
    raise StrategyError(f"{name}= takes a whole number from 1, found {shown(value)}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _choice(choices: tuple[str, ...]) -> Check:
    def check(name: str, value: Any) -> Any:
        if value is not None and value not in choices:
            known = ", ".join(map(repr, choices))
            raise StrategyError(f"{name}= takes one of {known}, or None, found {shown(value)}")
        return value

    return check


def _in_flight(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(map(_is_count, value)):
        raise StrategyError(
            f"{name}= takes for each stage how many micro-batches it may hold, from 1, such as (4, 3, 2, 1), or None, "
            f"found {shown(value)}"
        )
    return tuple(value)


def _norm(name: str, value: Any) -> float | None:
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise StrategyError(f"{name}= takes a number above 0, or None, found {shown(value)}")
    return float(value)


def _precision(name: str, value: Any) -> object:
    return short_form(value)


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    return name_patterns(f"{name}=", value)


def _signatures(name: str, value: Any) -> dict[str, str | tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise StrategyError(
            f"{name}= takes a mapping from names of results to signatures, found {shown(value)}"
        )
    found: dict[str, str | tuple[str, ...]] = {}
    for op, text in value.items():
        every = tuple(text) if isinstance(text, list | tuple) else (text,)
        if not isinstance(op, str) or not every or not all(map(_is_signature, every)):
            raise StrategyError(
                f"{name}={{{op!r}: …}} takes a signature such as 'S(0), B -> S(0)', or a tuple with one for each axis "
                f"of the placement, found {shown(text)}"
            )
        found[op] = every if isinstance(text, list | tuple) else every[0]
    return found


def _grid(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(map(_is_count, value)):
        raise StrategyError(
            f"{name}= takes the number of ranks along each axis of the placement, such as (16, 8), found {shown(value)}"
        )
    return tuple(value)


def _is_signature(text: object) -> bool:
    if not isinstance(text, str) or text.count("->") != 1:
        return False
    try:
        signature_sides(text)
    except LayoutError:
        return False
    return True


_CHECKS: Mapping[str, Check] = {
    "batch": _layouts,
    "parameters": _layouts,
    "activations": _layouts,
    "stages": _stages,
    "micro_batches": _count,
    "schedule": _choice(SCHEDULES),
    "in_flight": _in_flight,
    "zero": checked_zero,
    "recompute": _patterns,
    "offload": _patterns,
    "precision": _precision,
    "clip_norm": _norm,
    "memory_limit": _limit,
    "expert_capacity": _norm,
    "signatures": _signatures,
    "grid": _grid,
}
