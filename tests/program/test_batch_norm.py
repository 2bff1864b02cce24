"""BatchNorm over ranks: statistics of the whole batch, fused where it is whole, one reduction each way where not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import classification_loss
from single_device import adamw, assert_same_state, compiled, plain_training
from weft.ir.logical import Box, Call

S, B = weft.split, weft.broadcast
PAIR, GRID = [0, 1], [[0, 1], [2, 3]]
DATA = weft.data_parallel()


def batch_of(*shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return {"x": 2 * x + 1, "y": torch.randint(4, shape[:1], generator=generator)}


def around(norm: nn.Module, kind: Any = nn.Conv2d) -> nn.Module:
    """`norm` of 6 channels behind a convolution, or a linear layer, and a head of 4 classes."""
    torch.manual_seed(0)
    if kind is nn.Linear:
        first, places = nn.Linear(3, 6), 6
    else:
        first, places = kind(3, 6, 3, padding=1), 6 * 4 ** (2 if kind is nn.Conv2d else 1)
        places = 6 * 64 if kind is nn.Conv3d else places
    return nn.Sequential(first, norm, nn.ReLU(), nn.Flatten(), nn.Linear(places, 4)).double()


NORMS: dict[str, tuple[nn.Module, Any, tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d(6), nn.Linear, (6, 3)),
    "1d over positions": (nn.BatchNorm1d(6, momentum=0.7), nn.Conv1d, (5, 3, 4)),
    "2d": (nn.BatchNorm2d(6, eps=1e-3), nn.Conv2d, (5, 3, 4, 4)),
    "3d": (nn.BatchNorm3d(6), nn.Conv3d, (4, 3, 4, 4, 4)),
    "not affine": (nn.BatchNorm2d(6, affine=False), nn.Conv2d, (5, 3, 4, 4)),
    "no running statistics": (
        nn.BatchNorm2d(6, track_running_stats=False),
        nn.Conv2d,
        (5, 3, 4, 4),
    ),
    "neither": (nn.BatchNorm1d(6, affine=False, track_running_stats=False), nn.Linear, (6, 3)),
    "evaluation": (nn.BatchNorm2d(6).eval(), nn.Conv2d, (5, 3, 4, 4)),
    "instance norm": (
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        nn.Conv2d,
        (4, 3, 4, 4),
    ),
    "group norm": (nn.GroupNorm(2, 6), nn.Conv2d, (5, 3, 4, 4)),
}
STRATEGIES: dict[str, tuple[Any, weft.Strategy]] = {
    "data": (PAIR, DATA),
    "channels": (PAIR, weft.Strategy(batch={"*": B}, parameters={"0.weight": S(0)})),
    "both": (GRID, weft.Strategy(batch={"*": (S(0), B)}, parameters={"0.weight": (B, S(0))})),
    "data on two axes": (GRID, weft.Strategy(batch={"*": S(0)})),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NORMS)
def test_it_trains_as_one_device(name: str, strategy: str) -> None:
    norm, kind, shape = NORMS[name]
    grid, chosen = STRATEGIES[strategy]
    model = around(norm, kind)
    batches = [batch_of(*shape, seed=seed) for seed in range(2)]
    losses, state = plain_training(model, classification_loss, batches)
    with compiled(model, classification_loss, batches[0], grid, chosen) as program:
        assert [program.step(b).item() for b in batches] == pytest.approx(losses, rel=1e-10)
        assert_same_state(program.full_state_dict(), state)


def test_ranks_without_a_sample_reduce_what_others_do() -> None:
    """Sums of a backward go alone, on ranks that have nothing to add to them as well."""
    model = around(nn.BatchNorm2d(6))
    batches = [batch_of(2, 3, 4, 4, seed=seed) for seed in range(2)]
    losses, state = plain_training(model, classification_loss, batches)
    strategy = weft.data_parallel()
    grid = [0, 1, 2]
    with compiled(model, classification_loss, batches[0], grid, strategy) as program:
        assert ops(program)["weft.batch_norm_sums"] == 1
        assert [program.step(b).item() for b in batches] == pytest.approx(losses, rel=1e-10)
        assert_same_state(program.full_state_dict(), state)


def ops(program: weft.Program) -> Counter[str]:
    return Counter(node.op for node in program.graph.of_kind(Call) if "norm" in node.op)


def test_a_whole_batch_is_normalized_by_the_fused_ops() -> None:
    model, batch = around(nn.BatchNorm2d(6)), batch_of(4, 3, 4, 4)
    channels = weft.Strategy(batch={"*": B}, parameters={"0.weight": S(0), "1.*": S(0)})
    for grid, strategy in (([0], DATA), (PAIR, channels)):
        with compiled(model, classification_loss, batch, grid, strategy) as program:
            assert ops(program) == {
                "aten._native_batch_norm_legit_functional.default": 1,
                "aten.native_batch_norm_backward.default": 1,
            }


def test_a_split_batch_takes_one_small_reduction_each_way() -> None:
    model, batch = around(nn.BatchNorm2d(6)), batch_of(4, 3, 4, 4)
    with compiled(model, classification_loss, batch, PAIR, DATA) as program:
        found: list[Box] = program.graph.of_kind(Box)
        shapes = [box.output.shape for box in found if box.output.shape[:1] == (2,)]
        assert shapes == [(2, 6), (2, 6)]
        # Gradients of the norm's weight and bias are rows of what was reduced.
        rows = [c.outputs[0].name for c in program.graph.of_kind(Call) if c.op == "aten.select.int"]
        assert len(rows) == 2
        assert not {box.input.name for box in found} & set(rows)


@pytest.mark.parametrize("precision", ["bf16", None])
def test_lower_precision(precision: str | None) -> None:
    batch = {**batch_of(4, 3, 4, 4), "x": batch_of(4, 3, 4, 4)["x"].float()}
    found = []
    for grid in ([0], PAIR):
        model = around(nn.BatchNorm2d(6)).float()
        with weft.local_world(len(grid)):
            program = weft.compile(
                model,
                classification_loss,
                adamw(model),
                batch,
                placement=weft.placement("cpu", grid),
                strategy=weft.Strategy(batch={"*": S(0)}, precision=precision),
            )
            found.append([program.step(batch).item() for _ in range(3)])
            program.close()
    assert found[0] == pytest.approx(found[1], rel=2e-2 if precision else 1e-5)
