"""Groups of calls: the same op at the same place of each repeated block; and the edges between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

from weft.compiler.families.table import legal_signatures
from weft.errors import RuleError
from weft.ir.logical import Call, LogicalGraph
from weft.ir.queries.op_calls import op_call
from weft.ops import Signature
from weft.search.steps.repeated import Blocks
from weft.units import ITEM_SIZE, Bytes


@final
@dataclass(frozen=True)
class Group:
    """Calls of one op at the same place of blocks.

    Attributes:
        name: of the first call's first result.
        calls: the names of their first results.
        size: bytes that the first call reads and writes.
    """

    name: str
    calls: tuple[str, ...]
    size: Bytes


@final
@dataclass(frozen=True)
class GroupEdge:
    """A value that a call of one group makes and a call of another reads.

    Attributes:
        source, target: the names of the groups.
        result: its number among the results of the source.
        operand: its number among the operands of the target.
        size: its bytes.
    """

    source: str
    target: str
    result: int
    operand: int
    size: Bytes


def groups_of(graph: LogicalGraph, blocks: Blocks | None) -> tuple[Group, ...]:
    """The groups of a step; those that read and write most first.

    Args:
        graph: the step, as captured.
        blocks: that come again in it.
    """
    seen: dict[tuple[str, str, int, bool], list[Call]] = {}
    places: dict[tuple[str, bool], int] = {}
    for call in graph.of_kind(Call):
        if call.hint is not None or not call.makes:
            continue
        module = call.location.module if call.location is not None else ""
        number = blocks.of(module) if blocks is not None else None
        forward = call.phase.kind == "forward"
        place = places[module, forward] = places.get((module, forward), -1) + 1
        if number is not None and blocks is not None:
            module = f"*{module.removeprefix(blocks.path(number))}"
        seen.setdefault((call.op, module, place, forward), []).append(call)
    found = [
        Group(_name(own[0]), tuple(map(_name, own)), _size(graph, own[0])) for own in seen.values()
    ]
    return tuple(sorted(found, key=lambda each: -each.size))


def places_of(names: Iterable[str], blocks: Blocks | None) -> dict[str, list[str]]:
    """The names of variables that each pattern stands for: the same place in every block."""
    found: dict[str, list[str]] = {}
    for name in names:
        number = blocks.of(name) if blocks is not None else None
        pattern = name
        if number is not None and blocks is not None:
            pattern = f"{blocks.prefix}.*{name.removeprefix(blocks.path(number))}"
        found.setdefault(pattern, []).append(name)
    return found


def edges_of(graph: LogicalGraph, groups: Sequence[Group]) -> tuple[GroupEdge, ...]:
    """The edges between groups, each pair of ends once; the largest first."""
    group = {call: each.name for each in groups for call in each.calls}
    made = {
        value.name: (group[_name(call)], number)
        for call in graph.of_kind(Call)
        if call.makes and _name(call) in group
        for number, value in enumerate(call.makes)
    }
    found: dict[tuple[str, str], GroupEdge] = {}
    for call in graph.of_kind(Call):
        if not call.makes or _name(call) not in group:
            continue
        for operand, used in enumerate(call.uses):
            source, result = made.get(used, ("", 0))
            target = group[_name(call)]
            if source and source != target:
                size = _bytes(graph, used)
                found.setdefault((source, target), GroupEdge(source, target, result, operand, size))
    return tuple(sorted(found.values(), key=lambda each: -each.size))


def legal_signatures_of(graph: LogicalGraph, parts: int) -> Mapping[str, tuple[Signature, ...]]:
    """For each call, by its first result, the signatures that its op's rule has on so many ranks; () without a rule."""
    return {
        _name(call): _legal(graph, call, parts)
        for call in graph.of_kind(Call)
        if call.makes and call.hint is None
    }


def _legal(graph: LogicalGraph, call: Call, parts: int) -> tuple[Signature, ...]:
    try:
        return legal_signatures(op_call(graph, call), parts, False)
    except RuleError:
        return ()


def _name(call: Call) -> str:
    return call.makes[0].name


def _size(graph: LogicalGraph, call: Call) -> Bytes:
    return Bytes(sum(_bytes(graph, name) for name in (*call.uses, *(v.name for v in call.makes))))


def _bytes(graph: LogicalGraph, name: str) -> Bytes:
    value = graph.values[name]
    return Bytes(prod(value.shape) * ITEM_SIZE[value.dtype])
