"""Tell the gradients of a stage's own weights apart from all that other stages wait for.

Before: a local program whose backward calls have the kind "backward". After: calls of the loop on which nothing
in another stage depends before the end of the loop have the kind "weight"; they may fill gaps (zero bubble
pipelines, Qi et al. 2024, section 2).
"""

from __future__ import annotations

from dataclasses import replace

from weft.ir.arguments import changed
from weft.ir.nodes import Phase
from weft.ir.plan import Collective, LocalCall, LocalNode, LocalProgram


def split_backward(program: LocalProgram) -> LocalProgram:
    """The program with weights' gradients told apart; the same without micro-batches."""
    awaited: set[str] = set()
    found: list[LocalNode] = []
    stages = {value.name: node.phase.stage for node in program.nodes for value in node.makes}
    for node in reversed(program.nodes):
        needed = any(value.name in awaited for value in node.makes)
        if _in_loop(program, node):
            awaited.update(
                name
                for name in node.reads
                if needed or stages.get(name, node.phase.stage) != node.phase.stage
            )
        found.append(node if needed or not _may_wait(program, node) else _for_weights(node))
    return program.with_nodes(reversed(found))


def _in_loop(program: LocalProgram, node: LocalNode) -> bool:
    if not program.loop.isdisjoint(node.reads):
        return True
    return any(value.name in program.loop for value in node.makes)


def _may_wait(program: LocalProgram, node: LocalNode) -> bool:
    return (
        isinstance(node, LocalCall | Collective)
        and node.phase.kind == "backward"
        and _in_loop(program, node)
    )


def _for_weights(node: LocalNode) -> LocalNode:
    phase = Phase(node.phase.stage, "weight")
    return changed(node, phase=phase) if isinstance(node, LocalCall) else replace(node, phase=phase)
