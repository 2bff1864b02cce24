"""The fields of a strategy: checked as users give them, and as plain data, which is in YAML files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from weft.errors import LayoutError, StrategyError, is_number, is_whole, wrong
from weft.layout import SBP, Broadcast, Partial, Split, parse_sbp, placement
from weft.patterns import name_patterns
from weft.strategy.parts import SCHEDULES, Schedule, Stage, Zero, Zeros, checked_zero
from weft.strategy.precision import Precision, short_form

# One SBP for every axis of the grid, or one for each.
SBPs: TypeAlias = SBP | tuple[SBP, ...]

# The fields that map patterns to SBPs.
LAYOUTS = ("batch", "parameters", "activations")


def sbps_of(sbp: SBPs) -> tuple[SBP, ...]:
    """The SBPs of all axes, from one SBP for all axes or one for each."""
    return sbp if isinstance(sbp, tuple) else (sbp,)


def signature_sides(text: str) -> tuple[tuple[SBP, ...], tuple[SBP, ...]]:
    """The SBPs of an op's operands and of its results, from a text such as "S(0), B -> S(0)".

    Raises:
        LayoutError: when it is not a signature.
    """
    operands, _, results = text.partition("->")
    return _sbps_in(operands), _sbps_in(results)


def _sbps_in(text: str) -> tuple[SBP, ...]:
    return tuple(parse_sbp(part.strip()) for part in text.split(",") if part.strip())


def plain(name: str, value: Any) -> Any:
    """The field `name` of a strategy as lists, dicts, numbers and text."""
    if name in LAYOUTS:
        return {
            pattern: list(map(str, sbp)) if isinstance(sbp, tuple) else str(sbp)
            for pattern, sbp in value.items()
        }
    if name == "signatures":
        return {op: list(text) if isinstance(text, tuple) else text for op, text in value.items()}
    if isinstance(value, tuple):
        return [_plain_stage(part) if isinstance(part, Stage) else part for part in value]
    if name == "zero" and isinstance(value, Mapping):
        return {pattern: _plain_zero(zero) for pattern, zero in value.items()}
    if isinstance(value, Zero):
        return _plain_zero(value)
    if isinstance(value, Precision):
        return value.content()
    return value


def parse_field(name: str, content: Any) -> Any:
    """The field `name` from what `plain` made of it.

    Raises:
        LayoutError, TypeError, AttributeError, KeyError: when it is something else.
    """
    if name in LAYOUTS:
        entries = {} if content is None else content
        return {
            pattern: tuple(map(parse_sbp, text)) if isinstance(text, list) else parse_sbp(text)
            for pattern, text in entries.items()
        }
    if name == "stages" and isinstance(content, list):
        return tuple(_parsed_stage(part) for part in content)
    if name == "zero" and content is not None:
        return _parsed_zero(content)
    if name == "precision" and isinstance(content, dict):
        return Precision(**content)
    return content


def _plain_zero(zero: Zero | None) -> dict[str, int] | None:
    return None if zero is None else {"level": zero.level, "axis": zero.axis}


def _parsed_zero(content: Mapping[str, Any]) -> Zeros:
    """One for all parameters, whose entries are numbers; or one for each pattern."""
    if not isinstance(content, Mapping):
        raise StrategyError(
            "expected {level: …, axis: …}, or that or null for each pattern of names"
        )
    if any(isinstance(each, int) for each in content.values()):
        return Zero(**content)
    return {name: None if each is None else Zero(**each) for name, each in content.items()}


def _plain_stage(stage: Stage) -> dict[str, Any]:
    where = stage.placement
    return {"patterns": list(stage.patterns), "device": where.device_type, "ranks": where.grid}


def _parsed_stage(content: Mapping[str, Any]) -> Stage:
    if not isinstance(content, Mapping) or set(content) != {"patterns", "device", "ranks"}:
        raise StrategyError("expected the entries patterns, device and ranks of each stage")
    return Stage(content["patterns"], placement(content["device"], content["ranks"]))


# Stages and micro-batches, at most; far above any that a machine has.
MOST = 1 << 16


def checked_field(name: str, value: Any) -> Any:
    """The field `name` of a strategy, as it is held.

    Raises:
        StrategyError: naming the field, what it must be and what was given.
    """
    return _CHECKS[name](f"{name}=", value)


def _checked_layouts(name: str, patterns: Any) -> dict[str, SBPs]:
    if not isinstance(patterns, Mapping):
        raise wrong(name, "a mapping from name patterns to SBPs", patterns, StrategyError)
    return {pattern: _checked_sbps(name, pattern, sbp) for pattern, sbp in patterns.items()}


def _checked_sbps(name: str, pattern: object, sbp: object) -> SBPs:
    if not isinstance(pattern, str):
        raise wrong(f"a key of {name}", "a name pattern", pattern, StrategyError)
    parts = tuple(sbp) if isinstance(sbp, list | tuple) else (sbp,)
    if not parts or not all(isinstance(part, Split | Broadcast | Partial) for part in parts):
        expected = "weft.split(dim), weft.broadcast or a tuple of them with one entry for each axis of the placement"
        raise wrong(f"{name}{{{pattern!r}: …}}", expected, sbp, StrategyError)
    return parts if isinstance(sbp, list | tuple) else parts[0]


def _stages(name: str, value: Any) -> tuple[Stage, ...] | int:
    if is_whole(value, 1):
        return _count(name, value)
    stages = tuple(value) if isinstance(value, list | tuple) else (None,)
    if not all(isinstance(stage, Stage) for stage in stages):
        expected = "a number of stages, or a list of weft.Stage(patterns, placement=…)"
        raise wrong(name, expected, value, StrategyError)
    return stages


def _count(name: str, value: Any) -> int:
    if not is_whole(value, 1):
        raise wrong(name, "a whole number from 1", value, StrategyError)
    if value > MOST:
        raise wrong(name, f"a whole number up to {MOST}", value, StrategyError)
    return int(value)


def _limit(name: str, value: Any) -> int | None:
    if value is None or is_whole(value, 1):
        return value
    raise wrong(name, "a whole number from 1", value, StrategyError)


def _schedule(name: str, value: Any) -> Schedule | None:
    if value is None or value in SCHEDULES:
        return value  # type: ignore[no-any-return]
    raise wrong(name, f"one of {', '.join(map(repr, SCHEDULES))}, or None", value, StrategyError)


def _counts(expected: str, least: int) -> Callable[[str, Any], tuple[int, ...]]:
    def check(name: str, value: Any) -> tuple[int, ...]:
        counts = value if isinstance(value, list | tuple) else (None,)
        if len(counts) < least or not all(is_whole(each, 1) for each in counts):
            raise wrong(name, expected, value, StrategyError)
        return tuple(counts)

    return check


_grid = _counts("the number of ranks along each axis of the placement, such as (16, 8)", 0)
_held = _counts(
    "for each stage how many micro-batches it may hold, from 1, such as (4, 3, 2, 1), or None", 1
)


def _in_flight(name: str, value: Any) -> tuple[int, ...] | None:
    return None if value is None else _held(name, value)


def _norm(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not is_number(value) or value <= 0:
        raise wrong(name, "a number above 0, or None", value, StrategyError)
    return float(value)


def _signatures(name: str, value: Any) -> dict[str, str | tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise wrong(name, "a mapping from names of results to signatures", value, StrategyError)
    found: dict[str, str | tuple[str, ...]] = {}
    for op, text in value.items():
        every = tuple(text) if isinstance(text, list | tuple) else (text,)
        if not isinstance(op, str) or not every or not all(map(_is_signature, every)):
            expected = "a signature such as 'S(0), B -> S(0)', or a tuple with one for each axis of the placement"
            raise wrong(f"{name}{{{op!r}: …}}", expected, text, StrategyError)
        found[op] = every if isinstance(text, list | tuple) else every[0]
    return found


def _is_signature(text: object) -> bool:
    if not isinstance(text, str) or text.count("->") != 1:
        return False
    try:
        signature_sides(text)
    except LayoutError:
        return False
    return True


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(LAYOUTS, _checked_layouts),
    "stages": _stages,
    "micro_batches": _count,
    "schedule": _schedule,
    "in_flight": _in_flight,
    "zero": checked_zero,
    "recompute": name_patterns,
    "offload": name_patterns,
    "precision": lambda _, value: short_form(value),
    "clip_norm": _norm,
    "memory_limit": _limit,
    "expert_capacity": _norm,
    "signatures": _signatures,
    "grid": _grid,
}
