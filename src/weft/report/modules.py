"""The model as rows: parameters and buffers with their layouts, modules with their lines and calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from weft.compiler.pipeline import Compiled
from weft.ir.logical import Call, Input, Location, LogicalGraph, Update, Value
from weft.patterns import first_match
from weft.report.choices import Choices
from weft.strategy.sharding import level_of, zero_rules
from weft.strategy.strategy import Strategy
from weft.traces.events import near
from weft.units import ITEM_SIZE


def model_rows(compiled: Compiled, strategy: Strategy | None) -> dict[str, Any]:
    """The rows of the tree and the choices that they name, as JSON has them.

    Args:
        compiled: with layouts.
        strategy: that it was compiled by, for reasons; None leaves them out.
    """
    choices = Choices(compiled.graph)
    rows = [*_variables(compiled, strategy), *_modules(compiled.graph, choices)]
    return {"rows": rows, "choices": choices.found}


def _variables(compiled: Compiled, strategy: Strategy | None) -> Iterator[dict[str, Any]]:
    graph, homes = compiled.graph, compiled.stages.homes
    inputs = graph.of_kind(Input)
    keys = {node.value.name: node.key for node in inputs}
    states = {
        keys[update.target.name]: [keys[ref.name] for ref in update.states if ref.name in keys]
        for update in graph.of_kind(Update)
        if update.target.name in keys
    }
    laid = {node.key: node.value for node in inputs}
    for node in inputs:
        if node.role in ("parameter", "buffer"):
            own = {key.removeprefix(f"{node.key}."): laid[key] for key in states.get(node.key, ())}
            yield {
                "path": node.key,
                "role": node.role,
                **_tensor(node.value),
                "stage": homes.get(node.key, 0),
                "stored": compiled.stored.get(node.key),
                "states": {name: _tensor(value) for name, value in own.items()},
                "why": [*_reasons(node.key, compiled, strategy)],
            }


def _reasons(key: str, compiled: Compiled, strategy: Strategy | None) -> Iterator[str]:
    """The entries of a strategy that say how a variable lies."""
    if key in compiled.stored:
        yield f"stored in shards along axis {compiled.stored[key]}, and used whole"
    if strategy is None:
        return
    level = level_of(zero_rules(strategy.zero), key)
    if level:
        yield f"ZeRO {level}, as the strategy says"
    pattern = first_match(strategy.parameters, key)
    yield (
        "its layout is deduced: the cheapest for all calls together"
        if pattern is None
        else f'parameters["{pattern}"] of the strategy fixes its layout'
    )


def _tensor(value: Value) -> dict[str, Any]:
    layout = value.layout
    return {
        "shape": list(value.shape),
        "dtype": value.dtype,
        "bytes": prod(value.shape) * ITEM_SIZE.get(value.dtype, 8),
        "layout": [] if layout is None else [str(sbp) for sbp in layout.sbp],
        "grid": [] if layout is None else list(layout.placement.shape),
        "ranks": [] if layout is None else _spans(layout.placement.ranks),
    }


def _spans(ranks: tuple[int, ...]) -> list[list[int]]:
    """Ranks as runs of neighbours: first and last of each."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def _modules(graph: LogicalGraph, choices: Choices) -> Iterator[dict[str, Any]]:
    """A row for each module whose forward made calls."""
    calls: dict[str, list[tuple[Call, Location]]] = {}
    for node in graph.of_kind(Call):
        if node.location is not None:
            calls.setdefault(node.location.module, []).append((node, node.location))
    for path, every in calls.items():
        again = sum(call.phase.kind != "forward" and not where.backward for call, where in every)
        yield {
            "path": path,
            "role": "module",
            "lines": list(dict.fromkeys(_line(where) for _, where in every)),
            "stages": sorted({call.phase.stage for call, _ in every}),
            "again": again,
            "calls": [
                [*shown, times]
                for shown, times in Counter(
                    _call(graph.values, choices, call, where) for call, where in every
                ).items()
            ],
        }


def _call(
    values: Mapping[str, Value], choices: Choices, call: Call, where: Location
) -> tuple[str, str, str, str, int]:
    """A call as it is shown: its op, line, pass, shapes, and the number of its choice."""
    forward = call.phase.kind == "forward"
    phase = call.phase.kind if forward or where.backward else "made again"
    shapes = ", ".join(_short(values[name]) for name in call.operands)
    made = ", ".join(_short(value) for value in call.makes)
    return call.op, _line(where), phase, f"{shapes} → {made}", choices.of(call)


def _line(where: Location) -> str:
    return near(f"{where.file}:{where.line}")


def _short(value: Value) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
