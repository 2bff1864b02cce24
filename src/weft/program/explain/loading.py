"""The part of `Program.explain` that says how batches come to their steps."""

from __future__ import annotations

import math

from weft.ir.plan import RankPlan
from weft.units import ITEM_SIZE, Bytes, bytes_text, counted


def loading_text(plan: RankPlan | None) -> str:
    """The plan of the last loop that loaded ahead, as text, and how much its registers hold; nothing of None."""
    if plan is None:
        return ""
    held = sum(
        each.credits * math.prod(each.value.shape) * ITEM_SIZE[each.value.dtype]
        for each in plan.registers
    )
    # Registers of one actor have equal credits.
    credits = {each.producer: each.credits for each in plan.registers}
    ahead = counted(sum(credits.values()), "batch", "batches")
    return (
        f"loading ahead of the steps, by the last loop: {ahead}, {bytes_text(Bytes(held))} in registers at most, "
        f"beside the batch of the step\n{plan}"
    )
