"""Decoders of `transformers` without a mask in the batch: causal attention without a mask, as plain PyTorch trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install -c constraints.txt -e '.[models]'")

import torch

import weft
from examples.models import huggingface
from tools.model_cases import Case, Comparison
from weft.ir.logical import Call

FAMILIES = huggingface.FAMILIES
PAIR = [0, 1]
DATA, LONG = weft.data_parallel(), weft.context_parallel()
PACKED = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])


def packed(n: int, seed: int) -> huggingface.Batch:
    """Two sequences in each row, told by their positions."""
    return {**huggingface.tokens(n, seed), "position_ids": PACKED.expand(n, -1).clone()}


class Seen(Comparison):
    """Keeps the graph of the program that it trains."""

    def compile(self, grid: Any, strategy: weft.Strategy) -> weft.Program:
        program = super().compile(grid, strategy)
        self.graph = program.graph
        return program

    def masks(self) -> set[object]:
        """Of the ops of attention: whether they have a mask."""
        calls = [node for node in self.graph.of_kind(Call) if "attention" in node.op]
        assert calls
        return {"attn_mask" in dict(call.kwargs) for call in calls}


def comparison(name: str, batch: Any = huggingface.tokens, **sizes: Any) -> Seen:
    family = FAMILIES[name]
    # With a cache, which these are trained without, they look for no packed sequences.
    family = replace(family, sizes={**family.sizes, "use_cache": False, **sizes})
    return Seen(Case(family.build, huggingface.loss, batch, family.layouts))


TENSOR = {
    name: weft.Strategy(batch={"*": weft.broadcast}, parameters=FAMILIES[name].layouts)
    for name in ("llama", "mixtral")
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama", replace(DATA, zero=weft.Zero(3), micro_batches=2, recompute=("model.layers.*",))),
        ("llama", TENSOR["llama"]),
        ("llama", LONG),
        ("qwen3", LONG),
        ("mixtral", TENSOR["mixtral"]),
        ("gpt2", replace(DATA, stages=2, micro_batches=2)),
    ],
)
def test_without_a_mask(name: str, strategy: weft.Strategy) -> None:
    compared = comparison(name)
    found = compared.difference(PAIR, strategy)
    assert compared.masks() == {False}
    assert max(found.loss, found.state) < 1e-11, found


@pytest.mark.parametrize("strategy", [DATA, LONG])
def test_a_window_as_long_as_the_sequence(strategy: weft.Strategy) -> None:
    compared = comparison("mistral", sliding_window=huggingface.TIME)
    found = compared.difference(PAIR, strategy)
    assert compared.masks() == {False}
    assert max(found.loss, found.state) < 1e-11, found


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("llama", huggingface.masked_tokens),
        ("llama", packed),
        ("mistral", huggingface.tokens),  # a window of 4 tokens
    ],
)
def test_masks_that_stay(name: str, batch: Any) -> None:
    compared = comparison(name, batch)
    found = compared.difference(PAIR, DATA)
    assert compared.masks() == {True}
    assert max(found.loss, found.state) < 1e-11, found
