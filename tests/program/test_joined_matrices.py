"""Matrices that join several, split over ranks: equal to one device, whole for users, with the textbook's bytes.

Queries, keys and values, or a gate and what it gates, come from one matrix; models differ in how they cut
its outputs into parts.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from single_device import adamw, assert_same_state, assert_same_training, compiled, plain_training
from weft.boxing import steps
from weft.ir.logical import Box, Input
from weft.units import ITEM_SIZE

pytestmark = pytest.mark.usefixtures("double_precision")

PAIR, LINE, GRID = [0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]]
WIDTH, HEADS, INNER, N, TIME = 16, 4, 24, 4, 96
COLUMNS, ROWS = ("blocks.*.qkv", "blocks.*.up"), ("blocks.*.out", "blocks.*.down")
TENSOR = weft.tensor_parallel(COLUMNS, ROWS)


class Block(nn.Module):
    """Attention and a gated layer, each of one joined matrix: [n, time, width] -> the same."""

    def __init__(self, cut: str, kv: int = HEADS) -> None:
        super().__init__()
        self.cut, self.kv, each = cut, kv, WIDTH // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv) * each)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * INNER, bias=cut != "slices")
        self.down = nn.Linear(INNER, WIDTH)

    def parts(self, y: Tensor) -> tuple[Tensor, ...]:
        n, time, _ = y.shape
        each = WIDTH // HEADS
        if self.cut == "view":
            return y.view(n, time, 3, HEADS, each).transpose(1, 3).unbind(2)
        if self.cut == "select":
            parted = y.unflatten(-1, (3, WIDTH)).unsqueeze(0).transpose(0, -2).squeeze(-2)
            pieces: Any = (parted[0], parted[1], parted[2])
        elif self.cut == "slices":
            first, second = WIDTH, WIDTH + self.kv * each
            pieces = (y[..., :first], y[..., first:second], y[..., second:])
        elif self.cut == "chunk":
            pieces = y.clamp(-3, 3).chunk(3, dim=2)
        else:
            pieces = y.split((WIDTH, self.kv * each, self.kv * each), dim=2)
        return tuple(piece.unflatten(-1, (-1, each)).transpose(1, 2) for piece in pieces)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(self.qkv(self.norm1(x)))
        groups = HEADS // self.kv
        k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.up(self.norm2(x))
        if self.cut == "chunk":
            y = F.glu(y)
        else:
            gate, value = y.chunk(2, dim=-1)
            y = F.silu(gate) * value
        z: Tensor = self.down(y)
        return x + z


class Joined(nn.Module):
    """Two blocks: [n, time, width] -> the same."""

    def __init__(self, cut: str, kv: int = HEADS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(cut, kv) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def made(cut: str, kv: int = HEADS) -> Joined:
    torch.manual_seed(0)
    return Joined(cut, kv)


def batches(count: int = 3, time: int = TIME) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [
        {"x": torch.randn(N, time, WIDTH), "y": torch.randn(N, time, WIDTH)} for _ in range(count)
    ]


def in_shares(program: weft.Program) -> set[str]:
    return {node.key for node in program.graph.of_kind(Input) if node.shares}


def sent_bytes(program: weft.Program) -> float:
    """What a rank sends in a step, in the mean, without micro-batches."""
    values, found, ranks = program.graph.values, 0.0, 1
    for box in program.graph.of_kind(Box):
        source, layout = values[box.input.name], box.output.layout
        size, ranks = ITEM_SIZE[source.dtype], len(layout.placement.ranks)
        found += sum(each.bytes for each in steps(source.layout, layout, source.shape, size))
    return found / ranks


CUTS = [("split", 4), ("split", 2), ("slices", 2), ("chunk", 4), ("view", 4), ("select", 4)]


@pytest.mark.parametrize(("cut", "kv"), CUTS)
def test_bytes_and_training(cut: str, kv: int) -> None:
    """Four exchanges of all activations a block (Megatron-LM, section 3); states and losses of one device."""
    model, data = made(cut, kv), batches()
    expected = plain_training(model, loss, data)
    with compiled(model, loss, data[0], PAIR, TENSOR) as program:
        assert "blocks.1.qkv.weight" in in_shares(program)
        assert "blocks.0.up.weight.exp_avg" in in_shares(program)
        exchange = 2 * 1 / 2 * N * TIME * WIDTH * 8
        assert sent_bytes(program) <= 1.02 * 4 * 2 * exchange
        assert_same_training(program, data, expected)


STRATEGIES: dict[str, tuple[Any, weft.Strategy]] = {
    "four ranks": (LINE, TENSOR),
    "sequence": (PAIR, weft.tensor_parallel(COLUMNS, ROWS, sequence=1)),
    "hybrid, zero 1": (GRID, replace(weft.hybrid_parallel(COLUMNS, ROWS), zero=weft.Zero(1))),
    "hybrid, zero 3": (GRID, replace(weft.hybrid_parallel(COLUMNS, ROWS), zero=weft.Zero(3))),
    "micro-batches": (PAIR, replace(TENSOR, micro_batches=2)),
    "clipped": (PAIR, replace(TENSOR, clip_norm=0.5)),
    "recompute": (PAIR, replace(TENSOR, recompute=["blocks.*"])),
    "stages": (GRID, replace(TENSOR, stages=2, micro_batches=2)),
}


@pytest.mark.parametrize("case", STRATEGIES)
def test_with_other_strategies(case: str) -> None:
    grid, strategy = STRATEGIES[case]
    model, data = made("split"), batches()

    def clip(parameters: list[nn.Parameter]) -> None:
        if strategy.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, strategy.clip_norm)

    expected = plain_training(model, loss, data, clip)
    with compiled(model, loss, data[0], grid, strategy) as program:
        assert in_shares(program)
        assert_same_training(program, data, expected)


def test_loading_gives_back_what_was_read() -> None:
    model, data = made("split", 2), batches()
    with compiled(model, loss, data[0], LINE[:2], TENSOR) as program:
        first = program.full_state_dict()
        assert_same_state(first, model.state_dict(), tolerance=0.0)
        program.step(data[0])
        program.load_full_state_dict(first)
        assert_same_state(program.full_state_dict(), first, tolerance=0.0)


def test_states_of_the_users_optimizer_are_taken_over() -> None:
    model, data = made("split", 2), batches()
    optimizer = adamw(model)
    loss(model, data[0]).backward()
    optimizer.step()
    expected = [(loss(model, data[1])).item()]
    live, own = copy.deepcopy((model, optimizer))
    with weft.local_world(2):
        program = weft.compile(
            live,
            loss,
            own,
            data[1],
            placement=weft.placement("cpu", PAIR),
            strategy=TENSOR,
        )
        found = [program.step(each).item() for each in data[1:]]
        state = program.full_state_dict()
        program.close()
    optimizer.zero_grad()
    loss(model, data[1]).backward()
    optimizer.step()
    expected.append(loss(model, data[2]).item())
    optimizer.zero_grad()
    loss(model, data[2]).backward()
    optimizer.step()
    assert found == pytest.approx(expected, rel=1e-10)
    assert_same_state(state, model.state_dict())


def test_evaluation_reads_parameters_in_shares_and_in_order() -> None:
    model, data = made("split", 2), batches()

    def both(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch["x"]), model.blocks[0].qkv.weight * 2

    with compiled(model, loss, data[0], PAIR, TENSOR) as program:
        evaluation = program.evaluation(both, data[0])
        found, weight = evaluation.step(data[1])
        assert in_shares(evaluation)
        evaluation.close()
    expected, matrix = both(model, data[1])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(weight, matrix)


def test_batches_of_other_shapes() -> None:
    model, data = made("split", 2), [*batches(2), *batches(1, TIME // 2)]
    expected = plain_training(model, loss, data)
    with compiled(model, loss, data[0], PAIR, TENSOR) as program:
        assert_same_training(program, data, expected)


def test_bf16_with_masters() -> None:
    model, data = made("split", 2).float(), batches()
    data = [{key: value.float() for key, value in each.items()} for each in data]
    model = model.bfloat16()

    def cast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["x"].bfloat16()).float(), batch["y"])

    strategy = replace(TENSOR, precision=weft.Precision(masters=True))
    alone = replace(weft.data_parallel(), precision=weft.Precision(masters=True))
    results = []
    for each, grid in ((alone, [0]), (strategy, PAIR)):
        with compiled(model, cast, data[0], grid, each) as program:
            losses = [program.step(batch).item() for batch in data]
            results.append((losses, program.full_state_dict(masters=True)))
    assert results[1][0] == pytest.approx(results[0][0], rel=2e-2)
    assert_same_state(results[1][1], results[0][1], tolerance=0.2)


def test_what_shares_cannot_serve_stays_in_order() -> None:
    """A layer that is cut in one place and read whole in another, or in parts that ranks do not divide."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.wide = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 10)
            self.down = nn.Linear(6 + 5, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y, z = self.up(x), self.wide(x)
            gate, value = y.chunk(2, dim=-1)
            one, two = z.chunk(2, dim=-1)
            out: Tensor = self.down(torch.cat([gate * value, one + two], dim=-1))
            return out + y.cumsum(-1)[..., -1:]

    torch.manual_seed(0)
    model, data = Odd(), batches()
    expected = plain_training(model, loss, data)
    with compiled(model, loss, data[0], PAIR, weft.tensor_parallel(["up", "wide"])) as program:
        assert not in_shares(program)
        assert_same_training(program, data, expected)
