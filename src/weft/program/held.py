"""Steps without an update, whose gradients are kept for a later one: which programs can run them."""

from __future__ import annotations

from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Update


def check_held(graph: LogicalGraph) -> None:
    """Raise UserError unless the gradients of several steps may simply be added up."""
    where = "step(…, update=False)"
    updates = [update for update in graph.of_kind(Update) if update.rule != "copy"]
    if not updates:
        raise UserError(f"{where} keeps gradients, but this program has no optimizer")
    if any(update.skip is not None for update in updates):
        raise UserError(
            f'{where} with a scaled loss (precision "fp16"): an overflow would have to skip all '
            "steps whose gradients are added up; use micro_batches= in the strategy, or bf16"
        )
