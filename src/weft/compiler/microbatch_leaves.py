"""Leaves of the batch that are cut into micro-batches: a user's dimension d is dimension d + 1 of the input."""

from __future__ import annotations

from weft.compiler.deduce import Hints
from weft.compiler.loops import cut_leaves
from weft.ir.logical import Input, LogicalGraph
from weft.layout import SBP, Split


def on_cut_leaves(hints: Hints, graph: LogicalGraph) -> Hints:
    """Hints for the batch as the user has it, as hints for the inputs of a graph in micro-batches."""
    cut = cut_leaves(graph)
    keys = {node.key for node in graph.of_kind(Input) if node.value.name in cut}
    return Hints(
        {
            key: tuple(map(_moved, sbps)) if key in keys else sbps
            for key, sbps in hints.inputs.items()
        },
        hints.stored,
        hints.shares,
    )


def _moved(sbp: SBP | None) -> SBP | None:
    return Split(sbp.dim + 1) if isinstance(sbp, Split) else sbp
