"""Sequences split over the ranks: as plain PyTorch trains, with the boxing that costs least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from llama import Llama, long_batch, next_token_loss
from models import GPT, Batch, token_batch, token_loss
from single_device import assert_same_state, assert_same_training, compiled, plain_training
from weft.boxing import steps
from weft.ir.logical import Box, Call, LogicalGraph
from weft.layout import SBP
from weft.units import ITEM_SIZE

pytestmark = pytest.mark.usefixtures("double_precision")

S, B = weft.split, weft.broadcast
LONG = weft.context_parallel()
PAIR, THREE, FOUR, GRID = [0, 1], [0, 1, 2], [0, 1, 2, 3], [[0, 1], [2, 3]]
COLUMNS = [f"blocks.*.{name}" for name in ("query", "key", "value", "gate", "up")]
ROWS = ["blocks.*.out", "blocks.*.down"]
# Large enough for layouts to be those of real sizes.
TIME, WIDTH, HEADS = 504, 64, 8


def _llama(layers: int = 1, **options: Any) -> Callable[[], nn.Module]:
    return lambda: Llama(layers=layers, **options)


def _tokens(time: int, n: int = 1, padded: int = 0) -> Callable[[int], Batch]:
    return lambda seed: long_batch(time, n, seed, padded)


Case = tuple[Callable[[], nn.Module], Callable[[int], Batch], Any, weft.Strategy]
CASES: dict[str, Case] = {
    "2 ranks": (_llama(), _tokens(12), PAIR, LONG),
    "3 ranks, tied": (_llama(tied=True), _tokens(12), THREE, LONG),
    "4 ranks, uneven": (_llama(), _tokens(10), FOUR, LONG),
    "as many heads of keys": (_llama(key_heads=4), _tokens(10), FOUR, LONG),
    "one head of keys": (_llama(key_heads=1), _tokens(12), PAIR, LONG),
    "not causal": (_llama(causal=False), _tokens(11), THREE, LONG),
    "padding": (_llama(), _tokens(12, padded=3), THREE, LONG),
    "two layers": (_llama(2), _tokens(12), PAIR, LONG),
    "three sequences": (_llama(), _tokens(12, 3), PAIR, LONG),
    "three sequences, uneven, padding": (_llama(), _tokens(11, 3, padded=3), PAIR, LONG),
    "four sequences, tied": (_llama(tied=True), _tokens(12, 4), THREE, LONG),
    "four sequences beside data": (
        _llama(),
        _tokens(12, 4),
        GRID,
        weft.context_parallel(data=True),
    ),
    "four sequences in micro-batches": (
        _llama(),
        _tokens(12, 4),
        PAIR,
        replace(LONG, micro_batches=2),
    ),
    "ZeRO 1": (_llama(), _tokens(12), PAIR, replace(LONG, zero=weft.Zero(1))),
    "ZeRO 3, recompute": (
        _llama(),
        _tokens(12),
        PAIR,
        replace(LONG, zero=weft.Zero(3), recompute=("blocks.*",)),
    ),
    "beside data": (_llama(), _tokens(12, 2), GRID, weft.context_parallel(data=True)),
    "beside data, ZeRO 3": (
        _llama(),
        _tokens(12, 2),
        GRID,
        replace(weft.context_parallel(data=True), zero=weft.Zero(3)),
    ),
    "beside tensor": (
        _llama(),
        _tokens(12),
        GRID,
        weft.context_parallel(columns=COLUMNS, rows=ROWS),
    ),
    "micro-batches": (_llama(), _tokens(12, 2), PAIR, replace(LONG, micro_batches=2)),
    "pipeline": (_llama(2), _tokens(12, 2), GRID, replace(LONG, stages=2, micro_batches=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_device(case: str) -> None:
    make_model, make_batch, grid, strategy = CASES[case]
    torch.manual_seed(0)
    model, batches = make_model(), [make_batch(seed) for seed in range(3)]
    expected = plain_training(model, next_token_loss, batches)
    with compiled(model, next_token_loss, batches[0], grid, strategy) as program:
        assert_same_training(program, batches, expected)


def test_several_sequences_send_what_one_of_their_length_does() -> None:
    """Linear layers and the loss flatten them, and send nothing for it."""
    sent = []
    for n in (1, 3):
        model, batch = Llama(64, WIDTH, 1, HEADS, 2, 160), long_batch(TIME // n // 2 * 2, n)
        with compiled(model, next_token_loss, batch, PAIR, LONG) as program:
            tokens = batch["x"].numel()
            found = _sent(program.graph, 2, "blocks.0", "head", "norm")
            sent.append({kind: count / tokens for kind, count in found.items()})
    assert sent[0] == sent[1]


def test_a_gpt_whose_positions_are_learned() -> None:
    torch.manual_seed(0)
    model, batches = GPT(layers=1, context=11), [token_batch(1, 11, seed=seed) for seed in range(3)]
    expected = plain_training(model, token_loss, batches)
    with compiled(model, token_loss, batches[0], THREE, LONG) as program:
        assert_same_training(program, batches, expected)


def test_dropout_is_the_same_on_any_number_of_ranks() -> None:
    torch.manual_seed(0)
    model = GPT(layers=1, context=12, dropout=0.2)
    batches = [token_batch(2, 12, seed=seed) for seed in range(3)]
    found = []
    for grid in ([0], THREE):
        with compiled(model, token_loss, batches[0], grid, LONG) as program:
            losses = [program.step(batch).item() for batch in batches]
            found.append((losses, program.full_state_dict()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-10)
    assert_same_state(found[1][1], found[0][1])


def test_the_fused_kernel_in_single_precision() -> None:
    torch.manual_seed(0)
    model, batches = Llama(layers=1).float(), [long_batch(40, seed=seed) for seed in range(3)]
    expected = plain_training(model, next_token_loss, batches)
    with compiled(model, next_token_loss, batches[0], THREE, LONG) as program:
        losses = [program.step(batch).item() for batch in batches]
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert_same_state(program.full_state_dict(), expected[1], 1e-4)


def _attentions(graph: LogicalGraph, direction: str = "") -> list[tuple[SBP, ...]]:
    """How queries and keys lie, on one axis."""
    op = f"aten._scaled_dot_product_flash_attention_for_cpu{direction}.default"
    first = 1 if direction else 0
    found = []
    for call in graph.of_kind(Call):
        if call.op == op:
            layouts = [graph.values[call.args[i].name].layout for i in (first, first + 1)]
            found.append(tuple(layout.sbp[0] for layout in layouts if layout))
    return found


def _sent(graph: LogicalGraph, ranks: int, *layers: str) -> dict[str, float]:
    """Elements that a rank sends on account of some modules' activations, by kind of exchange."""
    sent: dict[str, float] = {}
    for box in graph.of_kind(Box):
        source = graph.values[box.input.name]
        if "update" in box.cause or not any(layer in box.cause for layer in layers):
            continue
        for step in steps(source.layout, box.output.layout, source.shape, ITEM_SIZE[source.dtype]):
            sent.setdefault(step.kind, 0)
            sent[step.kind] += step.bytes / ITEM_SIZE[source.dtype] / ranks
    return {kind: count for kind, count in sent.items() if count}


@pytest.mark.parametrize(
    ("ranks", "key_heads", "by_heads"),
    [(2, 2, False), (4, 2, False), (4, 8, True), (4, 4, True), (8, 8, True)],
)
def test_attention_moves_as_few_bytes_as_the_textbook(
    ranks: int, key_heads: int, by_heads: bool
) -> None:
    """Keys and values gathered, or all by heads: forward, and the same again backward."""
    model = Llama(64, WIDTH, 2, HEADS, key_heads, 160)
    keys, away = key_heads * WIDTH // HEADS, TIME * (ranks - 1) / ranks
    with compiled(model, next_token_loss, long_batch(TIME), list(range(ranks)), LONG) as program:
        graph = program.graph
        expected = (S(1), S(1)) if by_heads else (S(2), B)
        assert _attentions(graph) == _attentions(graph, "_backward") == [expected] * 2
        sent = _sent(graph, ranks, "attention")
    if by_heads:
        assert sent == {"all_to_all": 2 * 2 * 2 * (WIDTH + keys) / ranks * away}
    else:
        assert sent == {"all_gather": 2 * 2 * keys * away, "reduce_scatter": 2 * 2 * keys * away}


def test_the_loss_exchanges_labels_alone() -> None:
    """A label of the next rank's is fetched with all labels, which are integers; no logits move."""
    model = Llama(64, WIDTH, 1, HEADS, 2, 160)
    with compiled(model, next_token_loss, long_batch(TIME), PAIR, LONG) as program:
        moved = [
            program.graph.values[box.input.name]
            for box in program.graph.of_kind(Box)
            if "update" not in box.cause and "attention" not in box.cause
        ]
    large = [value for value in moved if TIME in value.shape and 64 in value.shape[-1:]]
    assert [value.dtype for value in moved if value.shape == (1, TIME)] == ["int64"]
    assert len(large) <= 1  # the gradient of the embedding's rows, gathered instead of the table's


def test_strategies() -> None:
    assert weft.context_parallel().batch == {"*": S(1)}
    three = weft.context_parallel(2, data=True, columns=["up"], rows=["down"], whole=["scale"])
    assert three.batch == {"scale": (S(0), B, B), "*": (S(0), S(2), B)}
    assert three.parameters == {
        "up.weight": (B, B, S(0)),
        "up.bias": (B, B, S(0)),
        "down.weight": (B, B, S(1)),
        "down.bias": (B, B, B),
        "*": B,
    }


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_eager_attention_of_split_queries(key_heads: int) -> None:
    """Global tensors follow the same rules, forward and backward."""
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, 10, 8) for heads in (4, key_heads, key_heads)]
    plain = [one.clone().requires_grad_() for one in whole]
    out = _attend(*plain)
    out.square().sum().backward()
    with weft.local_world(4):
        placement = weft.placement("cpu", FOUR)
        sbps = (S(2), B, B)
        made = [
            weft.tensor(one, placement=placement, sbp=sbp, requires_grad=True)
            for one, sbp in zip(whole, sbps, strict=True)
        ]
        with weft.strict_boxing():
            found = _attend(*made)
        assert found.sbp == (S(2),)
        torch.testing.assert_close(found.full().detach(), out.detach())
        found.square().sum().backward()
        for one, expected in zip(made, plain, strict=True):
            torch.testing.assert_close(one.grad.full(), expected.grad)


def _attend(query: Any, key: Any, value: Any) -> Any:
    grouped = query.shape[1] != key.shape[1]
    return nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=grouped
    )


def test_more_ranks_than_tokens() -> None:
    """The user's split is kept: ranks without tokens take part with empty shards."""
    torch.manual_seed(0)
    model, batches = Llama(layers=1), [long_batch(3, seed=seed) for seed in range(2)]
    expected = plain_training(model, next_token_loss, batches)
    with compiled(model, next_token_loss, batches[0], FOUR, LONG) as program:
        assert_same_training(program, batches, expected)
