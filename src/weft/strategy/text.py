"""Strategies as plain data: what stands in their YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from weft.errors import StrategyError
from weft.layout import SBP, parse_sbp, placement
from weft.strategy.parts import Stage, Zero
from weft.strategy.precision import Precision
from weft.strategy.sharding import Zeros

# One SBP for every axis of the grid, or one for each.
SBPs: TypeAlias = SBP | tuple[SBP, ...]

# The fields that map patterns to SBPs.
LAYOUTS = ("batch", "parameters", "activations")


def sbps_of(sbp: SBPs) -> tuple[SBP, ...]:
    """One SBP for all axes, or one for each."""
    return sbp if isinstance(sbp, tuple) else (sbp,)


def signature_sides(text: str) -> tuple[tuple[SBP, ...], tuple[SBP, ...]]:
    """The SBPs of an op's operands and of its results, from a text such as "S(0), B -> S(0)".

    Raises:
        LayoutError: when it is no signature.
    """
    operands, _, results = text.partition("->")
    return _sbps_in(operands), _sbps_in(results)


def _sbps_in(text: str) -> tuple[SBP, ...]:
    return tuple(parse_sbp(part.strip()) for part in text.split(",") if part.strip())


def plain(name: str, value: Any) -> Any:
    """The field `name` of a strategy as lists, dicts, numbers and text."""
    if name in LAYOUTS:
        return {pattern: _plain_sbps(sbp) for pattern, sbp in value.items()}
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


def parsed(name: str, content: Any) -> Any:
    """The field `name` from what `plain` made of it.

    Raises:
        LayoutError, TypeError, AttributeError, KeyError: when it is something else.
    """
    if name in LAYOUTS:
        entries = {} if content is None else content
        return {pattern: _parsed_sbps(text) for pattern, text in entries.items()}
    if name == "stages" and isinstance(content, list):
        return tuple(_parsed_stage(part) for part in content)
    if name == "zero" and content is not None:
        return _parsed_zero(content)
    if name == "precision" and isinstance(content, dict):
        return Precision(**content)
    return content


def _plain_sbps(sbp: SBPs) -> Any:
    return [str(part) for part in sbp] if isinstance(sbp, tuple) else str(sbp)


def _parsed_sbps(text: Any) -> SBPs:
    return tuple(map(parse_sbp, text)) if isinstance(text, list) else parse_sbp(text)


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
