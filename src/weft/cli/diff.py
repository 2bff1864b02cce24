"""`weft diff`: what differs between two strategies for a graph file, and what each difference costs or saves."""

from __future__ import annotations

import json
from pathlib import Path

from weft.planning.differences import differences
from weft.planning.progress import progress
from weft.planning.stored_step import StoredStep
from weft.strategy.strategy import Strategy


def diff_strategies(
    first: Path, second: Path, graph: Path, topology: str, as_json: bool = False
) -> str:
    """Plan and simulate two strategies, and each difference by itself; returns what is to be printed.

    Args:
        graph: the graph file.
        topology: the machine (`machine_of`).

    Raises:
        UserError: a file cannot be read, or a strategy cannot be planned.
    """
    pair = Strategy.load(first), Strategy.load(second)
    with progress(first=True) as begin:
        begin("reading the graph file")
        step = StoredStep.load(graph)
        begin("planning the strategies, and what differs between them")
        found = differences(step, *pair, topology)
    return json.dumps(found.to_json()) if as_json else str(found)
