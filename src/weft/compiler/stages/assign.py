"""Assign each call to a stage.

Before: a captured graph whose calls are all in stage 0. After: the same graph with stages in its phases. Forward
calls go where `choose_stages` (`choose.py`) puts them, a backward call to the stage of its forward call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.compiler.context import Context
from weft.compiler.stages.choose import call_kind, first_result, forward_calls
from weft.ir.arguments import changed
from weft.ir.logical import (
    Call,
    Input,
    LogicalGraph,
    Node,
    Phase,
    Update,
    node_outputs,
    node_uses,
)


def assign_stages(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph with a stage for every call: forward calls as chosen, backward calls with their forward.

    Args:
        graph: as captured; phases say what is backward.
        context: with the stages (`choose_stages`).
    """
    stages = context.stages
    if len(stages.placements) == 1:
        return graph
    calls = forward_calls(graph)
    forward = {name: stages.calls[call_kind(name, call)] for name, call in calls.items()}
    every = forward | _backward(graph, forward, stages.homes)
    return replace(graph, nodes=tuple(_with_stage(node, every) for node in graph.nodes))


def _backward(
    graph: LogicalGraph, forward: Mapping[str, int], homes: Mapping[str, int]
) -> dict[str, int]:
    """The stage of every backward call, by the name of its first result.

    What belongs to no forward call, such as sums of gradients and the seed, stands with its
    operands where these are of one stage, else where its result is read: where the value is made
    that it is the gradient of. A sum to which more of a stage is added stands there, so that the
    stage sends its sum alone.
    """
    of_pair: dict[int, int] = {}
    made: dict[str, int] = {}
    for name, call in forward_calls(graph).items():
        made.update((value.name, forward[name]) for value in node_outputs(call))
        if call.autograd is not None:
            of_pair.setdefault(call.autograd, forward[name])
    known: dict[str, int] = {}
    backward = {first_result(c): c for c in graph.of_kind(Call) if c.phase.kind != "forward"}
    for name, call in backward.items():
        if call.autograd in of_pair:
            known[name] = of_pair[call.autograd]
    wanted = _readers(graph, {**forward, **known}, homes)
    for name, call in backward.items():
        operands = {made[used] for used in node_uses(call) if used in made}
        stage = min(operands, default=0)
        if len(operands) != 1 and not _goes_on(graph, call, known, stage):
            stage = wanted.get(name, 0)
        stage = known.get(name, stage)
        made.update((value.name, stage) for value in node_outputs(call))
    return {name: made[name] for name in backward}


def _goes_on(graph: LogicalGraph, call: Call, known: Mapping[str, int], stage: int) -> bool:
    """True where the results of a call are added to more that is made in a stage."""
    readers = (node for value in node_outputs(call) for node in graph.users[value.name])
    return any(
        known.get(first_result(graph.producers[used])) == stage
        for reader in readers
        if isinstance(reader, Call) and first_result(reader) not in known
        for used in node_uses(reader)
    )


def _readers(
    graph: LogicalGraph, known: Mapping[str, int], homes: Mapping[str, int]
) -> dict[str, int]:
    """For each call, by its first result, the stage of the first thing that reads it: an update or a known call.

    A reader whose stage is not known stands for its own readers.
    """
    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    found: dict[str, int] = {}
    for call in reversed(graph.of_kind(Call)):
        for reader in (n for value in node_outputs(call) for n in graph.users[value.name]):
            if isinstance(reader, Update):
                found.setdefault(first_result(call), homes.get(keys[reader.target.name], 0))
            else:
                stage = known.get(first_result(reader), found.get(first_result(reader)))
                if stage is not None:
                    found.setdefault(first_result(call), stage)
    return found


def _with_stage(node: Node, stages: Mapping[str, int]) -> Node:
    if not isinstance(node, Call):
        return node
    return changed(node, phase=Phase(stages[first_result(node)], node.phase.kind))
