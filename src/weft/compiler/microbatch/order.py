"""The order of a step in micro-batches: once-a-step prologue, loop, once-a-step epilogue; nothing that is not read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from weft.compiler.microbatch.values import SELECT
from weft.ir.logical import (
    Call,
    Input,
    LogicalGraph,
    Node,
    Value,
    node_outputs,
    node_uses,
    runs_in_loop,
)
from weft.ir.nodes import OVER_STEP
from weft.ir.renamed import renamed


def in_order(graph: LogicalGraph, leaves: Mapping[str, Value]) -> LogicalGraph:
    """The graph of a step in micro-batches, with its nodes in order.

    What makes one value of all micro-batches stands right behind what it reads, so that no
    micro-batch's value waits. Calls that run once a step stand in the loop when the loop reads what
    they make of the loop's results.

    Args:
        graph: with its calls in an order in which they could run.
        leaves: the leaves of the batch as they were before they were cut.
    """
    calls = _joins_early(_read(graph.of_kind(Call), graph.nodes))
    loop, late = _kinds(calls)
    barrier = _needed(calls, [call for index, call in enumerate(calls) if index in loop])
    places: tuple[list[Call], list[Call], list[Call]] = ([], [], [])
    for index, call in enumerate(calls):
        inside = index in loop or (index in late and index in barrier)
        places[1 if inside else 2 * (index in late)].append(call)
    ends = [node for node in graph.nodes if not isinstance(node, Input | Call)]
    ordered = replace(graph, nodes=(*graph.of_kind(Input), *chain(*places), *ends))
    return _whole_leaves(ordered, leaves)


def _read(calls: Sequence[Call], nodes: Iterable[Node]) -> list[Call]:
    """The calls whose results somebody reads in the end."""
    ends = [node for node in nodes if not isinstance(node, Call)]
    kept = _needed(calls, ends)
    return [call for index, call in enumerate(calls) if index in kept]


def _needed(calls: Sequence[Call], readers: Iterable[Node]) -> set[int]:
    """The numbers of the calls that `readers` need."""
    used = {name for node in readers for name in node_uses(node)}
    found = set()
    for index in reversed(range(len(calls))):
        if any(value.name in used for value in node_outputs(calls[index])):
            used.update(node_uses(calls[index]))
            found.add(index)
    return found


def _joins_early(calls: Sequence[Call]) -> list[Call]:
    """Accumulations and packings right behind the calls whose results they join."""
    joins: dict[str, list[Call]] = {}
    for call in calls:
        if call.op in OVER_STEP:
            joins.setdefault(node_uses(call)[0], []).append(call)
    found = []
    for call in calls:
        if call.op not in OVER_STEP:
            found.append(call)
            found += [join for value in node_outputs(call) for join in joins.get(value.name, ())]
    return found


def _kinds(calls: Sequence[Call]) -> tuple[set[int], set[int]]:
    """The numbers of the calls in the loop, and of those that need results of the loop."""
    loop, late = set(), set()
    looped: set[str] = set()
    waiting: set[str] = set()
    for index, call in enumerate(calls):
        names = {value.name for value in node_outputs(call)}
        if runs_in_loop(call, looped):
            loop.add(index)
            (waiting if call.op in OVER_STEP else looped).update(names)
        elif any(name in waiting for name in node_uses(call)):
            late.add(index)
            waiting |= names
    return loop, late


def _whole_leaves(graph: LogicalGraph, leaves: Mapping[str, Value]) -> LogicalGraph:
    """Leaves of which no micro-batch reads a part stay as the user gives them."""
    read = {call.uses[0] for call in graph.of_kind(Call) if call.op == SELECT and call.varyings}
    uncut = leaves.keys() - read
    leaves = {name: leaves[name] for name in uncut}
    names: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        uses = node_uses(node)
        if isinstance(node, Call) and uses and _is_whole(node, leaves.get(uses[0])):
            # The view of the whole leaf is the leaf now.
            names[node_outputs(node)[0].name] = uses[0]
        elif isinstance(node, Input) and node.value.name in uncut:
            nodes.append(replace(node, value=leaves[node.value.name], cut=False))
        else:
            nodes.append(renamed(node, names))
    return graph.with_nodes(nodes)


def _is_whole(node: Call, leaf: Value | None) -> bool:
    """True where a call is the view of a whole leaf."""
    return leaf is not None and node_outputs(node)[0].shape == leaf.shape
