"""A step with fewer of its repeated blocks: quick to plan, for estimates of what the whole step takes.

Blocks in the middle are left out. What the last of them makes in the forward, the block before them makes in its
place, value for value; in the backward the block after them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.errors import InternalError
from weft.ir import LogicalGraph, verify
from weft.ir.logical import Call, Input, Node, Output, Ref, Update
from weft.planning.stored_step import StoredStep
from weft.search.steps.repeated import Blocks, Spans, ops_in, repeated_blocks, spans_of


def with_fewer_blocks(step: StoredStep, count: int) -> StoredStep | None:
    """The step with so many of its blocks; None where blocks differ, or read each other in other ways.

    Args:
        step: as it was captured.
        count: of blocks that stay, three at least.
    """
    blocks = repeated_blocks(step.modules)
    spans = blocks and spans_of(step.graph, blocks)
    if not blocks or not spans or not 3 <= count < blocks.count:
        return None
    # The first and the last two stay: what surrounds all blocks may stand among the calls of the ends.
    gone = range(count - 2, blocks.count - 2)
    renamed = _renamed(step.graph, spans, gone)
    if renamed is None:
        return None
    graph = _without(step.graph, blocks, spans, gone, renamed)
    if graph is None:
        return None
    try:
        verify(graph)
    except InternalError:  # something reads of a block that is left out what nothing stands for
        return None
    modules = tuple(path for path in step.modules if blocks.of(path) not in gone)
    return replace(step, graph=graph, modules=modules)


def _renamed(graph: LogicalGraph, spans: Spans, gone: range) -> dict[str, str] | None:
    """For each value of the last block left out, by the way of data, the one that stands for it."""
    pairs = [(spans.forward[gone[-1]], spans.forward[gone[0] - 1])]
    if spans.backward:
        pairs.append((spans.backward[gone[0]], spans.backward[gone[-1] + 1]))
    found: dict[str, str] = {}
    for old, new in pairs:
        # The first block and the last one may have calls of what surrounds them, at their ends.
        if ops_in(graph, old) != ops_in(graph, new)[: len(old)]:
            return None
        for one, other in zip(old, new, strict=False):
            made = zip(graph.nodes[one].makes, graph.nodes[other].makes, strict=True)
            found |= {value.name: same.name for value, same in made}
    return found


def _without(
    graph: LogicalGraph, blocks: Blocks, spans: Spans, gone: range, renamed: dict[str, str]
) -> LogicalGraph | None:
    """The graph without the calls and variables of some blocks; None where an update reads what they made."""
    left_out = {number for block in gone for number in spans.forward[block]}
    if spans.backward:
        left_out |= {number for block in gone for number in spans.backward[block]}

    def stays(number: int, node: Node) -> bool:
        if isinstance(node, Update):
            return blocks.of(keys.get(node.target.name, "")) not in gone
        if isinstance(node, Input):
            return node.role == "batch" or blocks.of(node.key) not in gone
        return number not in left_out

    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    nodes = [node for number, node in enumerate(graph.nodes) if stays(number, node)]
    made = {value.name for node in nodes for value in node.makes}
    names = {name: other for name, other in renamed.items() if name not in made}
    read = [_reading(node, names) for node in nodes]
    whole = [node for node in read if node is not None]
    return graph.with_nodes(whole) if len(whole) == len(read) else None


def _reading(node: Node, names: dict[str, str]) -> Node | None:
    """A node that reads other values; None for one that is no call or output."""
    if names.keys().isdisjoint(node.uses):
        return node
    if isinstance(node, Call):
        kwargs = tuple((key, _argument(arg, names)) for key, arg in node.kwargs)
        return replace(node, args=_argument(node.args, names), kwargs=kwargs)
    if isinstance(node, Output):
        return replace(node, value=_argument(node.value, names))
    return None


def _argument(arg: Any, names: dict[str, str]) -> Any:
    if isinstance(arg, Ref):
        return Ref(names.get(arg.name, arg.name))
    return tuple(_argument(part, names) for part in arg) if isinstance(arg, tuple) else arg
