"""What `Program.explain` prints of all exchanges together: bytes by kind and dtype."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from weft.boxing import COLLECTIVES, steps
from weft.compiler.halo import graph_halos
from weft.compiler.signatures import layout_of
from weft.ir.logical import Box, LogicalGraph
from weft.program.tables import table
from weft.units import ITEM_SIZE, bytes_text


def exchange_tables(graph: LogicalGraph) -> tuple[Table, ...]:
    """A row for each kind of exchange and dtype; none where nothing is exchanged."""
    moved = sorted(exchanged(graph).items())
    rows = [(kind, dtype, bytes_text(size)) for (kind, dtype), size in moved]
    columns = ("as", "dtype", "bytes")
    return (table("exchanges of a step", columns, rows),) if rows else ()


def exchanged(graph: LogicalGraph) -> Counter[tuple[str, str]]:
    """Bytes that all ranks together send in a step, by kind ("all_gather", "halo") and dtype."""
    loop, found = graph.loop, Counter[tuple[str, str]]()

    def times(name: str) -> int:
        return graph.micro_batches if name in loop else 1

    for node in graph.of_kind(Box):
        value, target = graph.values[node.input.name], layout_of(node.output)
        for step in steps(layout_of(value), target, value.shape, ITEM_SIZE[value.dtype]):
            if step.kind in COLLECTIVES and step.bytes:
                found[step.kind, value.dtype] += step.bytes * times(node.output.name)
    for halo, _ in graph_halos(graph):
        found["halo", halo.value.dtype] += halo.total * times(halo.value.name)
    return found
