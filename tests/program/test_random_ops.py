"""Random ops draw by global position: the same masks on one rank, two or four, in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from models import GPT, token_batch, token_loss
from weft.layout import Placement

S, B = weft.split, weft.broadcast
BATCHES = [token_batch(4, seed=seed) for seed in range(3)]


def losses_with_dropout(
    placement: Placement, strategy: weft.Strategy, seed: int = 7, probability: float = 0.3
) -> list[float]:
    torch.manual_seed(0)
    model = GPT(dropout=probability).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    with weft.local_world(len(placement.ranks)):
        program = weft.compile(
            model,
            token_loss,
            optimizer,
            BATCHES[0],
            placement=placement,
            strategy=strategy,
            seed=seed,
        )
        return [program.step(batch).item() for batch in BATCHES]


@cache
def losses_on_one() -> list[float]:
    """Those of one rank."""
    return losses_with_dropout(weft.placement("cpu", [0]), weft.data_parallel())


@pytest.mark.parametrize(
    ("grid", "strategy"),
    [
        ([0, 1], weft.data_parallel()),
        ([0, 1, 2, 3], weft.data_parallel()),
        ([0, 1], weft.tensor_parallel(["blocks.*.up"], ["blocks.*.down"])),
        ([[0, 1], [2, 3]], weft.hybrid_parallel(["blocks.*.up"], ["blocks.*.down"])),
        ([0, 1], weft.Strategy(batch={"*": S(1)})),
    ],
    ids=["data 2", "data 4", "tensor 2", "hybrid 4", "sequence 2"],
)
def test_dropout_is_the_same_in_every_layout(grid: Any, strategy: weft.Strategy) -> None:
    found = losses_with_dropout(weft.placement("cpu", grid), strategy)
    assert found == pytest.approx(losses_on_one(), rel=1e-10)


def test_the_seed_and_the_step_decide() -> None:
    one = weft.placement("cpu", [0])
    assert losses_with_dropout(one, weft.data_parallel()) == losses_on_one()
    assert losses_with_dropout(one, weft.data_parallel(), seed=8) != losses_on_one()
    assert losses_with_dropout(one, weft.data_parallel(), probability=0.0) != losses_on_one()


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(x) + torch.rand(x.shape, dtype=x.dtype)


def test_every_step_and_every_op_draws_anew() -> None:
    def both(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch["x"]), model(batch["x"])

    batch = {"x": torch.zeros(6, 5)}
    with weft.local_world(2):
        program = weft.compile(
            Noise(), both, None, batch, placement=weft.placement("cpu", [0, 1]), seed=3
        )
        (a, b), (c, _) = program.step(batch), program.step(batch)
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)
    assert len(a.unique()) == a.numel()


ROWS, WIDTH = 12, 50
GRIDS = {"2": [0, 1], "4": [0, 1, 2, 3], "2x2": [[0, 1], [2, 3]]}


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "randn_complex": lambda x: torch.randn(x.shape, dtype=torch.complex128),
    "randint": lambda x: torch.randint(3, 9, x.shape),
    "randint_like": lambda x: torch.randint_like(x, 7),
    "random_": lambda x: _empty(x).random_(2, 5),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.25),
    "bernoulli_tensor": lambda x: _empty(x).bernoulli_(x),
    "uniform_": lambda x: _empty(x).uniform_(-2, 4),
    "normal_": lambda x: _empty(x).normal_(3, 2),
    "normal_sized": lambda x: torch.normal(3.0, 2.0, x.shape, dtype=x.dtype),
    "normal_tensors": lambda x: torch.normal(x, 2 * x),
    "normal_mean": lambda x: torch.normal(x, 0.5),
    "normal_std": lambda x: torch.normal(3.0, x),
    "exponential_": lambda x: _empty(x).exponential_(2.0),
    "log_normal_": lambda x: _empty(x).log_normal_(0.5, 0.25),
    "cauchy_": lambda x: _empty(x).cauchy_(1.0, 2.0),
    "geometric_": lambda x: _empty(x).geometric_(0.25),
    "poisson": lambda x: torch.poisson(8 * x),
    "randperm": lambda x: torch.randperm(40),
    "multinomial": lambda x: torch.multinomial(x, 300, replacement=True),
    "multinomial_without": lambda x: torch.multinomial(x, WIDTH // 2),
    "dropout": lambda x: F.dropout(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3),
    "feature_dropout": lambda x: F.dropout2d(x.reshape(ROWS, 5, 2, 5), 0.4),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.reshape(ROWS, 5, 2, 5), 0.4, True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, tau=0.5),
    "gumbel_hard": lambda x: F.gumbel_softmax(x, hard=True),
}
WEIGHTS = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def draw_all(grid: Any, batch: Any, seed: int = 5) -> dict[str, torch.Tensor]:
    """One step that draws from every distribution."""

    def every(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: draw(batch["x"]) for name, draw in DRAWS.items()}

    example = {"x": WEIGHTS}
    placement = weft.placement("cpu", grid)
    with weft.local_world(len(placement.ranks)):
        program = weft.compile(
            nn.Identity(),
            every,
            None,
            example,
            placement=placement,
            strategy=weft.Strategy(batch={"*": batch}),
            seed=seed,
        )
        return program.step(example)


@pytest.fixture(scope="module")
def on_one() -> dict[str, torch.Tensor]:
    return draw_all([0], B)


@pytest.mark.parametrize(
    ("grid", "batch"),
    [("2", S(0)), ("4", S(1)), ("2x2", [S(0), S(1)])],
    ids=str,
)
def test_every_distribution_is_the_same_in_every_layout(
    on_one: dict[str, torch.Tensor], grid: str, batch: Any
) -> None:
    found = draw_all(GRIDS[grid], batch)
    for name, drawn in found.items():
        torch.testing.assert_close(drawn, on_one[name], rtol=1e-12, atol=1e-12, msg=name)


MOMENTS: dict[str, tuple[float, float]] = {
    "rand": (1 / 2, 1 / 12),
    "rand_like": (1 / 2, 1 / 12),
    "randn": (0, 1),
    "randn_complex": (0, 1),
    "randint": (5.5, 35 / 12),
    "randint_like": (3, 4),
    "random_": (3, 2 / 3),
    "bernoulli_p": (0.25, 0.25 * 0.75),
    "uniform_": (1, 3),
    "normal_": (3, 4),
    "normal_sized": (3, 4),
    "exponential_": (0.5, 0.25),
    "log_normal_": (math.exp(0.5 + 1 / 32), math.expm1(1 / 16) * math.exp(1 + 1 / 16)),
    "geometric_": (4, 12),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_means_and_variances(on_one: dict[str, torch.Tensor], name: str) -> None:
    mean, variance = MOMENTS[name]
    drawn = on_one[name]
    drawn = drawn if drawn.is_complex() else drawn.double()
    deviation = math.sqrt(variance / drawn.numel())
    assert abs(drawn.mean() - mean) < 4 * deviation
    assert drawn.var().item() == pytest.approx(variance, rel=0.35)


def test_distributions_that_follow_the_values(on_one: dict[str, torch.Tensor]) -> None:
    x = WEIGHTS
    count = x.numel()
    for name in ("bernoulli", "bernoulli_tensor"):
        assert set(on_one[name].unique().tolist()) == {0.0, 1.0}
        assert abs((on_one[name] - x).sum()) < 4 * (x * (1 - x)).sum().sqrt()
    normals = [(on_one["normal_tensors"] - x) / (2 * x), (on_one["normal_mean"] - x) / 0.5]
    for standard in (*normals, (on_one["normal_std"] - 3) / x):
        assert abs(standard.mean()) < 4 / math.sqrt(count)
        assert standard.var().item() == pytest.approx(1, rel=0.2)
    poisson = (on_one["poisson"] - 8 * x) / (8 * x).sqrt()
    assert abs(poisson.mean()) < 4 / math.sqrt(count)
    assert poisson.var().item() == pytest.approx(1, rel=0.3)
    assert torch.equal(on_one["poisson"], on_one["poisson"].round())
    # Half of all Cauchy numbers lie within one scale of the median.
    near = ((on_one["cauchy_"] - 1).abs() < 2).double().mean()
    assert near.item() == pytest.approx(0.5, abs=0.1)


def test_whole_numbers_permutations_and_samples(on_one: dict[str, torch.Tensor]) -> None:
    assert set(on_one["randint"].unique().tolist()) == {3, 4, 5, 6, 7, 8}
    assert set(on_one["random_"].unique().tolist()) == {2, 3, 4}
    assert on_one["geometric_"].min() == 1
    assert sorted(on_one["randperm"].tolist()) == list(range(40))
    assert on_one["randperm"].tolist() != list(range(40))
    without = on_one["multinomial_without"]
    assert all(len(set(row)) == WIDTH // 2 for row in without.tolist())
    # Heavy classes come early: the first ten of 25 draws weigh more than the last ten.
    taken = WEIGHTS.gather(1, without)
    assert taken[:, :10].sum() > taken[:, -10:].sum() * 1.1
    counts = torch.stack([row.bincount(minlength=WIDTH) for row in on_one["multinomial"]])
    expected = 300 * WEIGHTS / WEIGHTS.sum(1, keepdim=True)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square == pytest.approx(ROWS * (WIDTH - 1), rel=0.2)


def test_masks_and_slopes(on_one: dict[str, torch.Tensor]) -> None:
    kept = on_one["dropout"] != 0
    torch.testing.assert_close(on_one["dropout"], torch.where(kept, WEIGHTS / 0.7, 0))
    assert kept.double().mean().item() == pytest.approx(0.7, abs=0.08)
    whole = (on_one["feature_dropout"] != 0).flatten(2)
    assert torch.equal(whole.all(-1), whole.any(-1))
    assert 0.3 < whole.any(-1).double().mean() < 0.9
    x = WEIGHTS - 0.5
    slopes = (on_one["rrelu"] / x)[x < 0]
    assert 1 / 8 <= slopes.min() < 0.14
    assert 0.32 < slopes.max() <= 1 / 3
    assert torch.equal(on_one["rrelu"][x > 0], x[x > 0])
    torch.testing.assert_close(on_one["gumbel"].sum(1), torch.ones(ROWS, dtype=torch.float64))
    assert set(on_one["gumbel_hard"].unique().tolist()) == {0.0, 1.0}


def test_first_samples_follow_the_weights_and_classes_of_weight_zero_never_come() -> None:
    rows = 20_000

    def both(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        weights = batch["x"].expand(rows, -1)
        return torch.multinomial(weights, 4, replacement=True), torch.multinomial(weights, 3)

    batch = {"x": torch.tensor([0.0, 1.0, 0.0, 3.0, 6.0, 0.0])}
    with weft.local_world(2):
        program = weft.compile(
            nn.Identity(), both, None, batch, placement=weft.placement("cpu", [0, 1])
        )
        for drawn in program.step(batch):
            assert set(drawn.unique().tolist()) == {1, 3, 4}
            share = drawn[:, 0].bincount(minlength=6) / rows
            torch.testing.assert_close(share, batch["x"] / 10, atol=0.014, rtol=0)


def test_gradients_pass_random_slopes() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
        out = F.rrelu(model(batch["x"]), training=True)
        return out.sum(), out

    x = WEIGHTS - 0.5
    gradients = []
    for grid, batch in (([0], B), ([0, 1], S(0))):
        model = nn.Linear(WIDTH, 1, bias=False).double()
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with weft.local_world(len(grid)):
            program = weft.compile(
                model,
                loss_fn,
                optimizer,
                {"x": x},
                placement=weft.placement("cpu", grid),
                strategy=weft.Strategy(batch={"*": batch}),
            )
            _, out = program.step({"x": x})
            gradients.append(1 - program.full_state_dict()["weight"])
    before = x.sum(1, keepdim=True)
    slopes = out / before
    torch.testing.assert_close(gradients[0], (slopes * x).sum(0, keepdim=True))
    torch.testing.assert_close(gradients[1], gradients[0])
