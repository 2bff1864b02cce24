"""The phases of all nodes of a graph with boxing: calls have their own, other nodes follow what they stand beside."""

from __future__ import annotations

from collections.abc import Mapping

from weft.ir.logical import Box, Call, Input, LogicalGraph, Node, Output, Update
from weft.ir.nodes import FORWARD, Phase


def node_phases(graph: LogicalGraph, homes: Mapping[str, int]) -> list[Phase]:
    """The phase of each node of a graph with boxing, in order.

    A boxing with several readers is the first one's; one for the caller stands in the phase that
    makes its value.

    Args:
        graph: whose calls have phases.
        homes: the stages of parameters and buffers by key; those without one live in stage 0.
    """
    found: dict[str, Phase] = {}

    def phase(node: Node) -> Phase:
        match node:
            case Call():
                return node.phase
            case Box(output=output):
                return found[output.name]
            case Update(target=target):
                variable = graph.producers[target.name]
                key = variable.key if isinstance(variable, Input) else ""
                return Phase(homes.get(key, 0), "backward")
        return FORWARD

    for node in reversed(graph.nodes):
        if isinstance(node, Box):
            readers = [n for n in graph.users[node.output.name] if not isinstance(n, Output)]
            found[node.output.name] = phase(readers[0]) if readers else _maker(graph, node)
    return [phase(node) for node in graph.nodes]


def _maker(graph: LogicalGraph, node: Box) -> Phase:
    maker = graph.producers[node.input.name]
    while isinstance(maker, Box):
        maker = graph.producers[maker.input.name]
    return maker.phase if isinstance(maker, Call) else FORWARD
