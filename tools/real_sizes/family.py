"""A model family at its published sizes: how to build it, and the facts that textbook formulas need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import transformers
from torch import nn

from weft import patterns

Batch: TypeAlias = dict[str, torch.Tensor]
MakeBatch: TypeAlias = Callable[[int, int], Batch]
Loss: TypeAlias = Callable[[nn.Module, Any], torch.Tensor]
Work: TypeAlias = Callable[["Shape", nn.Module], tuple[int, int]]


@dataclass(frozen=True)
class Shape:
    """How large a model is planned.

    Attributes:
        layers: of the model; fewer than published where the formula scales with them.
        tokens: positions of a sequence; 1 for models without.
        sequences: of the whole batch, over all ranks.
        precision: "fp32"; "bf16", with parameters in float32 and work under autocast; or "pure bf16", with everything
            in bfloat16.
    """

    layers: int
    tokens: int
    sequences: int
    precision: str = "fp32"


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: as its authors call it.
        source: where its sizes are published.
        build: `build(layers, tokens)` makes the model on the meta device.
        batch: `batch(sequences, tokens)` makes a batch on the meta device.
        loss: of the model on a batch.
        layers: published number.
        hidden: elements of an activation between blocks, at one position.
        positions: of an activation between blocks, for one sequence of so many tokens.
        passes: how many positions of a sequence each matrix multiplies, by pattern of its name; the first that matches
            counts. Tables that are only looked up have 0.
        attention: multiply-adds of one product of queries and keys over one sequence, in all of `layers` layers.
        products: matrix products that attention makes of such a size, forward and backward: 6, or 7 where a fused
            kernel makes scores once more in the backward (FlashAttention, 2205.14135, section 3.1).
        columns, rows: linear layers that Megatron-LM splits by outputs and by inputs.
        tables: lookup tables and heads that it splits by their vocabulary.
        regions: pairs of a column and a row layer in each layer of the model, each with 2 all-reduces in the forward
            and backward together.
        ends: all-reduces of an activation for tables and heads, in the forward and backward together.
        experts: patterns of parameters that hold all experts in their first dimension.
        chosen: how many experts a token goes to, of how many.
        tied: tables that are heads as well.
        lookups: tables that are split by rows where the batch is split.
        blocks: patterns of the modules that are recomputed: one for each layer.
        sequence: whether its activations are [batch, positions, width] everywhere between regions.
        work: floating-point operations of a step, and of the forward of its blocks, where matrices and attention are
            not all.
        tensor: into how many parts heads and widths can be split.
        crossing: elements of the tensors of one sequence that go from one of four even stages to the next, for so many
            tokens; None where it is one activation between blocks each time.
        once: elements that go to a later stage once a step, beside tied tables' first copies.
    """

    name: str
    source: str
    build: Callable[[int, int], nn.Module]
    batch: MakeBatch
    layers: int
    hidden: int
    attention: Callable[[int, int], int]
    passes: Mapping[str, int | None]
    positions: Callable[[int], int] = lambda tokens: tokens
    products: int = 7
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    regions: float = 2
    ends: int = 2
    experts: tuple[str, ...] = ()
    chosen: tuple[int, int] = (0, 0)
    tied: tuple[str, ...] = ()
    lookups: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ("model.layers.*",)
    tensor: int = 8
    sequence: bool = True
    work: Work | None = None
    crossing: Callable[[int], tuple[int, ...]] | None = None
    once: Callable[[int], int] = lambda tokens: 0
    loss: Loss = lambda model, batch: model(**batch).loss

    def model(self, shape: Shape) -> nn.Module:
        """The model on the meta device, ready to train."""
        model = self.build(shape.layers, shape.tokens).train()
        return model.bfloat16() if shape.precision == "pure bf16" else model

    def pass_of(self, name: str, tokens: int) -> int:
        """How many positions of a sequence the matrix called `name` multiplies."""
        for pattern, positions in self.passes.items():
            if patterns.matches(pattern, name):
                return tokens if positions is None else positions
        return tokens


def matches(name: str, named: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to a module, or is a parameter, that some pattern names."""
    return any(patterns.covers(one, name) for one in named)


def on_meta(name: str, model: str, **sizes: Any) -> nn.Module:
    """A model of `transformers` on the meta device, `name` its config's class without "Config"."""
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("meta"):
        found: nn.Module = getattr(transformers, model)(config)
    return found


def tokens_batch(sequences: int, tokens: int) -> Batch:
    """Token ids and labels, int64 [sequences, tokens], on the meta device."""
    ids = torch.empty(sequences, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}
