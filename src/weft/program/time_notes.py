"""What `Program.explain` says about micro-batches, a line each."""

from __future__ import annotations

from collections.abc import Iterator

from weft.compiler.batch_norm import STATISTICS, takes_statistics
from weft.compiler.loops import cut_leaves
from weft.ir.logical import Call, Input, LogicalGraph, Node, node_outputs, node_uses, runs_in_loop
from weft.ir.nodes import OVER_STEP


def time_notes(graph: LogicalGraph) -> Iterator[str]:
    """How the batch is cut in time, and what is not as in a step of the whole batch."""
    if graph.micro_batches == 1:
        return
    leaves = [node for node in graph.of_kind(Input) if node.value.name in cut_leaves(graph)]
    loop, calls = graph.loop, graph.of_kind(Call)
    inside = sum(runs_in_loop(call, loop) for call in calls)
    names = ", ".join(node.key for node in leaves) or "nothing of the batch is cut"
    samples = leaves[0].value.shape[1] if leaves else 0
    yield (
        f"{graph.micro_batches} micro-batches of {samples} samples ({names}): {inside} calls run in "
        f"each, {len(calls) - inside} once a step"
    )
    yield from exceptions(graph)


def exceptions(graph: LogicalGraph) -> Iterator[str]:
    """What is not as in a step of the whole batch."""
    if graph.micro_batches == 1:
        return
    loop, calls = graph.loop, graph.of_kind(Call)
    modules = _normalized(calls, loop)
    if modules:
        yield (
            f"BatchNorm sees micro-batches in {', '.join(modules)}: statistics of each, and a new version "
            "of the running ones from each, as when gradients are accumulated in PyTorch"
        )
    for call in barriers(graph):
        yield f"all micro-batches wait for one another in {call.op} at {call.location}"


def _normalized(calls: list[Call], loop: frozenset[str]) -> tuple[str, ...]:
    """The modules whose statistics differ between micro-batches."""
    own = (
        call.location.module or "the model"
        for call in calls
        if call.location
        and (call.op == STATISTICS or takes_statistics(call))
        and runs_in_loop(call, loop)
    )
    return tuple(dict.fromkeys(own))


def barriers(graph: LogicalGraph) -> tuple[Call, ...]:
    """The calls that make one value of all micro-batches for which a node of the loop waits."""
    loop = graph.loop
    causes: dict[str, frozenset[int]] = {}
    found: set[int] = set()
    for number, node in enumerate(graph.nodes):
        before = frozenset[int]().union(*(causes.get(use, frozenset()) for use in node_uses(node)))
        if runs_in_loop(node, loop):
            found |= before
            before = frozenset((number,)) if _joins(node) else frozenset()
        causes |= {value.name: before for value in node_outputs(node)}
    return tuple(
        node for i, node in enumerate(graph.nodes) if i in found and isinstance(node, Call)
    )


def _joins(node: Node) -> bool:
    return isinstance(node, Call) and node.op in OVER_STEP
