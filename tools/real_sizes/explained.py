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


EXPLAINED: tuple[Explained, ...] = (
    Explained(
        "*",
        "ZeRO 3",
        "bytes",
        0.66,
        0.98,
        "the backward reads no table that was only looked up, so it is gathered once",
    ),
    Explained(
        "*",
        "recompute",
        "work",
        0.8,
        0.98,
        "the last product of a block is not made again: nothing in the backward reads it",
    ),
)
