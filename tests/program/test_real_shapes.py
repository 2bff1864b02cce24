"""Decoders with many tokens for their width: equal to one device, and with the textbook's bytes.

As at real sizes, activations are larger than parameters by far (2,048 tokens of width 16 are 6 times as large as
all parameters), so that a decision that pays for parameters with activations shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from decoders import COLUMNS, EXPERTS, ROWS, Decoder, Shape
from models import token_batch, token_loss
from single_device import assert_same_state, assert_same_training, compiled, plain_training
from weft.boxing import steps
from weft.ir.logical import Box
from weft.units import ITEM_SIZE

pytestmark = pytest.mark.usefixtures("double_precision")

PAIR, LINE, GRID = [0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]]
N, TIME = 8, 256
DATA = weft.data_parallel()
TENSOR = weft.tensor_parallel(COLUMNS, ROWS)
SEQUENCE = weft.tensor_parallel(COLUMNS, ROWS, sequence=1)
# Two heads of keys and values cannot be split over four ranks: every rank makes both.
QUERIES = tuple(name for name in COLUMNS if name[-2:] not in (".k", ".v"))
LLAMA, TIED = Shape(), Shape(tied=True)
GEMMA, QWEN3 = Shape(tied=True, centered=True, pairs=1), Shape(normed=True)
MIXTRAL = Shape(experts=4, hidden=16)

CASES: dict[str, tuple[Shape, Any, weft.Strategy]] = {
    "llama, four ranks share two heads": (LLAMA, LINE, weft.tensor_parallel(QUERIES, ROWS)),
    "llama, tensor and sequence": (LLAMA, PAIR, SEQUENCE),
    "llama, hybrid, zero 1": (
        LLAMA,
        GRID,
        replace(weft.hybrid_parallel(COLUMNS, ROWS), zero=weft.Zero(1)),
    ),
    "llama, two stages, micro-batches": (LLAMA, PAIR, weft.Strategy(stages=2, micro_batches=2)),
    "llama, zero 2, micro-batches": (
        LLAMA,
        PAIR,
        replace(DATA, micro_batches=2, zero=weft.Zero(2)),
    ),
    "llama, zero 3, recompute": (
        LLAMA,
        PAIR,
        replace(DATA, zero=weft.Zero(3), recompute=["blocks.*"]),
    ),
    "llama, all deduced": (LLAMA, PAIR, weft.Strategy()),
    "tied, two stages of two": (TIED, LINE, replace(DATA, stages=2)),
    "gemma, zero 3": (GEMMA, PAIR, replace(DATA, zero=weft.Zero(3))),
    "gemma, tensor": (GEMMA, PAIR, weft.tensor_parallel(QUERIES, ROWS)),
    "qwen3, zero 3": (QWEN3, PAIR, replace(DATA, zero=weft.Zero(3))),
    "qwen3, tensor and sequence": (QWEN3, PAIR, SEQUENCE),
    "mixtral, experts": (MIXTRAL, PAIR, weft.expert_parallel(EXPERTS)),
    "mixtral, experts, zero 3": (
        MIXTRAL,
        PAIR,
        replace(weft.expert_parallel(EXPERTS), zero=weft.Zero(3)),
    ),
}


def made(shape: Shape) -> Decoder:
    torch.manual_seed(0)
    return Decoder(shape)


def texts(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    return token_batch(N, TIME, shape.vocabulary, seed)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case: str) -> None:
    shape, grid, strategy = CASES[case]
    model, batches = made(shape), [texts(shape, seed) for seed in range(3)]
    expected = plain_training(model, token_loss, batches)
    with compiled(model, token_loss, batches[0], grid, strategy) as program:
        assert_same_training(program, batches, expected)


@pytest.mark.parametrize(("shape", "level"), [*((LLAMA, level) for level in range(4)), (TIED, 3)])
def test_bytes_of_data_parallelism(shape: Shape, level: int) -> None:
    """2 (p - 1) / p of the parameters' bytes; at level 3 once more for what the backward reads (ZeRO, section 7)."""
    model, batches = made(shape), [texts(shape, seed) for seed in range(3)]
    expected = plain_training(model, token_loss, batches)
    zero = weft.Zero(level) if level else None  # type: ignore[arg-type]
    with compiled(model, token_loss, batches[0], LINE, replace(DATA, zero=zero)) as program:
        assert_same_training(program, batches, expected)
        sent = sent_bytes(program)
    part = 3 / 4 * sum(parameter.numel() * 8 for parameter in model.parameters())
    assert 2 * part <= sent <= (3 if level == 3 else 2) * 1.02 * part


@pytest.mark.parametrize("strategy", [TENSOR, SEQUENCE], ids=["tensor", "sequence"])
def test_bytes_of_tensor_parallelism(strategy: weft.Strategy) -> None:
    """Four exchanges of all activations a block (Megatron-LM, section 3), and no parameter but those of norms."""
    model = made(LLAMA)
    with compiled(model, token_loss, texts(LLAMA), PAIR, strategy) as program:
        sent = sent_bytes(program)
    exchange = 2 * 1 / 2 * N * TIME * LLAMA.width * 8
    assert sent <= 1.02 * 4 * LLAMA.layers * exchange


def autocast_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return token_loss(model, batch)


@pytest.mark.parametrize("strategy", [replace(DATA, zero=weft.Zero(3)), SEQUENCE])
def test_bf16(strategy: weft.Strategy) -> None:
    """Plain PyTorch under autocast, as near as bfloat16 is."""
    model, batches = made(TIED).float(), [texts(TIED, seed) for seed in range(3)]
    losses, state = plain_training(model, autocast_loss, batches)
    strategy = replace(strategy, precision="bf16")
    with compiled(model, token_loss, batches[0], PAIR, strategy) as program:
        assert [program.step(batch).item() for batch in batches] == pytest.approx(losses, rel=2e-3)
        assert_same_state(program.full_state_dict(), state, tolerance=2e-2)


def sent_bytes(program: weft.Program) -> float:
    """What a rank sends in a step, in the mean, without micro-batches."""
    values, found, ranks = program.graph.values, 0.0, 1
    for box in program.graph.of_kind(Box):
        source, layout = values[box.input.name], box.output.layout
        assert source.layout is not None
        assert layout is not None
        size, ranks = ITEM_SIZE[source.dtype], len(layout.placement.ranks)
        found += sum(each.bytes for each in steps(source.layout, layout, source.shape, size))
    return found / ranks
