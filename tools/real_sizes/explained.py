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
_SIDE = "attention and MLP stand side by side: their input is gathered once, its gradient is reduced once"
_APART = (
    "what lies between regions stays in pieces, so an all-reduce is a reduce-scatter and an "
    "all-gather of the same bytes"
)
_LATENT = (
    "latents of keys and values are made once, each rank its rows, and gathered; "
    "the textbook's ranks all make them"
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
    Explained("*", "experts", "bytes", 0.6, 0.98, _ROWS),
    Explained("DeepSeek-V2 Lite", "[th]*", "bytes", 1.02, 1.09, _LATENT),
    *(Explained(name, "[th]*", "bytes", 0.6, 0.9, _SIDE) for name in ("Phi-2", "GPT-NeoX 20B")),
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
