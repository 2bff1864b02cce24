"""Why plans differ from the textbook: each entry bounds what it explains, so that it excuses nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explained:
    """A deviation that is understood.

    Attributes:
        row, kind: shell-like patterns of a row's family and of its strategy.
        quantity: of a check.
        least, most: ratios between which the sentence holds.
        why: the sentence.
    """

    row: str
    kind: str
    quantity: str
    least: float
    most: float
    why: str


_ROWS = (
    "a table's gradient is made from the gathered gradients of the rows that were looked up, "
    "fewer bytes than the table"
)
_ONCE = (
    "gathered once is what the backward does not read, as tables that are only looked up and biases, "
    "and the last block, whose backward follows its forward"
)
_APART = (
    "what lies between regions stays in pieces, so an all-reduce is a reduce-scatter and an "
    "all-gather of the same bytes"
)

EXPLAINED: tuple[Explained, ...] = (
    Explained("DLRM", "*", "bytes", 0.0, 0.98, _ROWS),
    Explained("*", "data", "bytes", 0.6, 0.98, _ROWS),
    Explained("*", "deduced", "bytes", 0.6, 0.98, _ROWS),
    Explained("*", "recompute", "bytes", 0.6, 0.98, _ROWS),
    Explained("*", "pipeline*", "bytes", 0.7, 0.98, _ROWS),
    Explained("*", "ZeRO [12]", "bytes", 0.8, 0.98, _ROWS),
    Explained("*", "ZeRO 3", "bytes", 0.5, 0.98, _ONCE),
    Explained("*", "tensor*", "bytes", 0.9, 0.98, _ROWS),
    Explained("*", "hybrid*", "bytes", 0.9, 0.98, _ROWS),
    Explained("*", "tensor", "exchanges", 1.02, 2.05, _APART),
    Explained("*", "hybrid", "exchanges", 1.02, 2.05, _APART),
    Explained(
        "*",
        "recompute",
        "work",
        0.8,
        0.98,
        "the last product of a block is not made again: nothing in the backward reads it",
    ),
)
