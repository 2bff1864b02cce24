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
_LATENT = (
    "latents of keys and values are made once, each rank its rows, and gathered; "
    "the textbook's ranks all make them"
)
_POSITIONS = (
    "relative positions are projected once for all ranks, each its part, and gathered; "
    "the textbook's ranks all do it"
)
_EACH_TIME = (
    "relative positions drop out anew in each micro-batch: each rank projects its part of them, "
    "gathers them and reduces their gradients each time"
)
_NORMS = (
    "where activations between regions are split by their width, which sends less for a table's gradient, each norm "
    "exchanges a number for each position"
)
_WINDOW = (
    "the mask of a window over the batch is made for a part of the batch on each rank: attention runs by sequences, "
    "and heads go there and back"
)
_ENDS = (
    "a transfer between stages is an act at both of its ends, and there are few gradients beside it where matrices are "
    "joined or blocks have one norm"
)
_THRICE = "a table that encoder, decoder and head read is gathered for each of them"
_BIASES = (
    "the gradient of the biases of positions is reduced before it goes to an earlier stage, and rows that were looked "
    "up are exchanged in each micro-batch"
)
_COLUMNS = (
    "a table whose rows the ranks do not divide lies in shards of columns: gathered, it is copied once more, and "
    "another stage's part of its gradient goes to columns after it was reduced to rows"
)
_CONDITION_SPLIT = (
    "what the condition makes in columns is gathered: the blocks apply it to whole widths"
)
_CONDITION = "the condition goes along with the activation, a vector for each sequence"
_STATISTICS = "the statistics of BatchNorm are those of all ranks: each forward of it, and each backward, adds them up"

_LOGITS = (
    "one device has loss and backward in one act, in which log-probabilities are written over the logits; between "
    "ranks the loss is added up in between, and both are kept"
)

EXPLAINED: tuple[Explained, ...] = (
    Explained("DLRM", "*", "bytes", 0.0, 0.98, _ROWS),
    Explained("*", "data", "bytes", 0.6, 0.98, _ROWS),
    Explained("*", "data", "peak", 1.02, 1.35, _LOGITS),
    Explained("*", "deduced", "bytes", 0.6, 0.98, _ROWS),
    Explained("*", "recompute", "bytes", 0.6, 0.98, _ROWS),
    Explained("*", "pipeline*", "bytes", 0.7, 0.98, _ROWS),
    Explained("*", "ZeRO [12]", "bytes", 0.8, 0.98, _ROWS),
    Explained("*", "ZeRO 3", "bytes", 0.5, 0.98, _ONCE),
    Explained("T5-3B", "ZeRO 3", "bytes", 1.02, 1.05, _THRICE),
    Explained("T5-3B", "pipeline*", "bytes", 1.02, 1.05, _BIASES),
    Explained("T5-3B", "pipeline*", "exchanges", 1.02, 1.3, _BIASES),
    Explained("GPT-2 XL", "pipeline + ZeRO 1", "bytes", 1.02, 1.04, _COLUMNS),
    Explained("DiT-XL/2", "pipeline*", "exchanges", 1.02, 1.4, _CONDITION),
    Explained("DiT-XL/2", "[th]*", "bytes", 1.02, 1.04, _CONDITION_SPLIT),
    Explained("ResNet-50", "pipeline*", "bytes", 1.02, 1.04, _STATISTICS),
    Explained("*", "tensor*", "bytes", 0.9, 0.98, _ROWS),
    Explained("*", "hybrid*", "bytes", 0.9, 0.98, _ROWS),
    Explained("*", "experts", "bytes", 0.6, 0.98, _ROWS),
    Explained("DeepSeek-V2 Lite", "[th]*", "bytes", 1.02, 1.09, _LATENT),
    Explained("Mistral 7B", "tensor", "exchanges", 2.05, 2.7, _WINDOW),
    Explained("*", "tensor", "exchanges", 2.05, 4.4, _NORMS),
    Explained("DeBERTa-v3-large", "*", "bytes", 1.02, 1.05, _POSITIONS),
    Explained("DeBERTa-v3-large", "pipeline*", "bytes", 1.02, 1.12, _EACH_TIME),
    Explained("DeBERTa-v3-large", "pipeline*", "exchanges", 1.02, 1.5, _EACH_TIME),
    Explained("Phi-[34] mini", "pipeline*", "exchanges", 1.02, 1.2, _ENDS),
    Explained("Command R 35B", "pipeline*", "exchanges", 1.02, 1.2, _ENDS),
    Explained("ResNet-50", "pipeline*", "exchanges", 1.02, 4.0, _STATISTICS),
    Explained("ResNet-50", "recompute", "exchanges", 1.02, 1.1, _STATISTICS),
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
