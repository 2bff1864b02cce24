"""Steps without an update, whose gradients are kept for a later one: which programs can run them."""

from __future__ import annotations

from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Update


def check_held(graph: LogicalGraph, update: bool) -> None:
    """Raise UserError unless the gradients of several steps may simply be added up.

    Args:
        graph: of a step.
        update: whether it is to update, by its gradients and those that stand in `parameter.grad`.
    """
    where = "step(…, update=False)"
    updates = [each for each in graph.of_kind(Update) if each.rule != "copy"]
    if not updates:
        raise UserError(f"{where} keeps gradients, but this program has no optimizer")
    if any(each.skip is not None for each in updates):
        if update:
            raise UserError(
                'a step with a scaled loss (precision "fp16") found gradients in parameter.grad, which it cannot add '
                "to: an overflow would have to skip them, too; call optimizer.zero_grad() before, or use bf16"
            )
        raise UserError(
            f'{where} with a scaled loss (precision "fp16"): an overflow would have to skip all '
            "steps whose gradients are added up; use micro_batches= in the strategy, or bf16"
        )
