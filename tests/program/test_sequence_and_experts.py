"""Sequence and expert parallelism as strategies: which boxing they lead to, and equality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from models import GPT, Block, token_batch, token_loss
from single_device import assert_same_training, compiled, plain_training
from weft.boxing import EXCHANGES, steps
from weft.errors import StrategyError
from weft.ir.logical import Box
from weft.units import ITEM_SIZE

pytestmark = pytest.mark.usefixtures("double_precision")

COLUMNS, ROWS = ("blocks.*.qkv", "blocks.*.up"), ("blocks.*.proj", "blocks.*.down")


def collectives(program: weft.Program, elements: int) -> list[str]:
    """What moves tensors of a number of elements, in the order of the step."""
    found: list[str] = []
    for box in program.graph.of_kind(Box):
        source, size = program.graph.values[box.input.name], ITEM_SIZE[box.output.dtype]
        if torch.Size(source.shape).numel() == elements:
            chain = steps(source.layout, box.output.layout, source.shape, size)
            found += [step.kind for step in chain if step.kind in EXCHANGES]
    return found


def test_sequence_parallelism() -> None:
    """Between the linear layers nothing is whole: no activation is all-reduced."""
    torch.manual_seed(0)
    model = GPT(width=64, heads=4, context=32, vocabulary=32)
    batches = [token_batch(8, time=32, vocabulary=32, seed=seed) for seed in range(2)]
    expected = plain_training(model, token_loss, batches)
    strategy = weft.tensor_parallel(COLUMNS, ROWS, sequence=1)
    with compiled(model, token_loss, batches[0], [0, 1], strategy) as program:
        kinds = collectives(program, 8 * 32 * 64)
        assert "all_reduce" not in kinds
        # After each layer in rows, and in the backward after each in columns but the first.
        assert kinds.count("reduce_scatter") == 2 * 2 + 2 * 2 - 1
        assert_same_training(program, batches, expected)


def test_sequence_parallelism_beside_data_parallelism() -> None:
    torch.manual_seed(0)
    model, batches = GPT(), [token_batch(4, seed=seed) for seed in range(2)]
    expected = plain_training(model, token_loss, batches)
    strategy = weft.hybrid_parallel(COLUMNS, ROWS, sequence=1)
    with compiled(model, token_loss, batches[0], [[0, 1], [2, 3]], strategy) as program:
        assert_same_training(program, batches, expected)


def test_activations_of_a_missing_module() -> None:
    strategy = weft.Strategy(activations={"block.*": weft.split(1)})
    with (
        pytest.raises(StrategyError, match=r"activations=\{'block\.\*'.*there|exist.*blocks"),
        compiled(GPT(), token_loss, token_batch(4), [0, 1], strategy),
    ):
        pass


class Mixture(nn.Module):
    """Experts as in GShard: a row of the batch sends up to `capacity` of its positions to each.

    [n, time, width] -> the same.
    """

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        best, chosen = weights.max(-1)
        sent = F.one_hot(chosen, weights.shape[-1])  # [n, time, experts]
        slots = F.one_hot(((sent.cumsum(1) - 1) * sent).clamp(max=self.capacity), self.capacity + 1)
        dispatch = (sent.unsqueeze(-1) * slots)[..., : self.capacity].to(x.dtype)
        inside = torch.einsum("ntec,ntw->encw", dispatch, x)
        made = torch.einsum("encw,ewv->encv", inside, self.up)
        made = torch.einsum("encv,evw->encw", F.relu(made), self.down)
        return x + torch.einsum("ntec,encw->ntw", dispatch * best[..., None, None], made)


class MixtureModel(nn.Module):
    """Embedding, a block, a mixture of experts, and a head: tokens int64 [n, time] -> logits."""

    def __init__(self, vocabulary: int = 17, width: int = 16, experts: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.block = Block(width, 2, 0.0)
        self.mixture = Mixture(width, experts, capacity=2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.mixture(self.block(self.tokens(tokens))))
        return logits


EXPERTS = ("mixture.up", "mixture.down")


@pytest.mark.parametrize("zero", [None, weft.Zero(2)])
def test_expert_parallelism(zero: Any) -> None:
    """Tokens travel to their experts and back, forward and backward; experts never."""
    torch.manual_seed(0)
    model, batches = MixtureModel(), [token_batch(8, seed=seed) for seed in range(2)]
    expected = plain_training(model, token_loss, batches)
    strategy = replace(weft.expert_parallel(EXPERTS), zero=zero)
    with compiled(model, token_loss, batches[0], [0, 1, 2, 3], strategy) as program:
        assert collectives(program, 8 * 8 * 2 * 16) == ["all_to_all"] * 4
        assert collectives(program, model.mixture.up.numel()) == []
        assert_same_training(program, batches, expected)


def test_saved_and_loaded(tmp_path: Any) -> None:
    for strategy in (
        weft.tensor_parallel(COLUMNS, ROWS, sequence=1),
        weft.hybrid_parallel(COLUMNS, ROWS, sequence=1),
        weft.expert_parallel(EXPERTS),
    ):
        strategy.save(tmp_path / "strategy.yaml")
        assert weft.Strategy.load(tmp_path / "strategy.yaml") == strategy
