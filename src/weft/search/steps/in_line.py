"""The parts of a step that stages are made of, and whether they stand in line."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weft.ir import LogicalGraph
from weft.ir.logical import Call, Input
from weft.ir.queries.op_calls import op_call
from weft.ops import flops
from weft.search.steps.repeated import Blocks
from weft.search.steps.ways_back import forward


def part_calls(graph: LogicalGraph) -> Sequence[Call]:
    """The forward calls that read a parameter, or what is made of it alone, and something else; in order."""
    parameters = _of_parameters(graph)
    return [
        call
        for call in forward(graph)
        if not parameters.isdisjoint(call.uses) and not parameters.issuperset(call.uses)
    ]


def _of_parameters(graph: LogicalGraph) -> set[str]:
    """Parameters, and what forward calls make of nothing else: casts and views."""
    found = {node.value.name for node in graph.of_kind(Input) if node.role == "parameter"}
    for call in forward(graph):
        if call.uses and found.issuperset(call.uses):
            found.update(value.name for value in call.makes)
    return found


def is_sequential(graph: LogicalGraph, blocks: Blocks | None) -> bool:
    """True where each part reads, through others, what the one before it made; so a step goes through all in turn.

    Parts are blocks, and outside of them products with a parameter. Towers side by side are
    not in line, nor gates of a cell.
    """
    parameters, heavy = _of_parameters(graph), {id(call) for call in part_calls(graph)}
    latest, last = dict[str, int](), -1
    number_of, linked = dict[object, int](), set[int]()
    for call in forward(graph):
        if parameters.issuperset(call.uses):
            continue
        before = max(latest.get(name, -1) for name in call.uses)
        part = _part(graph, blocks, call, heavy)
        if part is not None:
            last = number_of.setdefault(part, len(number_of))
            if before == last - 1:
                linked.add(last)
            before = max(before, last)
        for value in call.makes:
            latest[value.name] = before
    return len(linked) == len(number_of)


def _part(
    graph: LogicalGraph, blocks: Blocks | None, call: Call, heavy: Collection[int]
) -> object | None:
    """By which the part of a call is known: its block, or itself; None where it is of none."""
    if blocks is not None and call.location is not None:
        block = blocks.of(call.location.module)
        if block is not None:
            return block
    is_product = id(call) in heavy and flops(op_call(graph, call)) > 0
    return (id(call),) if is_product else None
