"""Numbers that a loss function reads from tensors and returns: each step returns them, whatever the strategy.

PYTEST_DONT_REWRITE: the asserts here are to be compiled as they are in a model.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from single_device import adamw, compiled
from weft.capture import batch as outputs
from weft.capture.fx import retrace
from weft.errors import RankFailure, VerificationError

pytestmark = pytest.mark.usefixtures("double_precision")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(rows: int = 8, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    return {"x": x, "y": torch.randint(0, 3, (rows,), generator=generator)}


def measured(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    """The loss, and numbers of each class."""
    scores = model(batch["x"])
    loss = nn.functional.cross_entropy(scores, batch["y"])
    right = scores.argmax(-1) == batch["y"]
    total = loss.detach().clone()
    before = total.item()
    total.mul_(2)  # the number is the one from before
    return {
        "loss": loss,
        "same": loss.item(),
        "before": before,
        "accuracy": right.float().mean().item(),
        "others": (right.sum().item(), [right.all().item()], scores[0].tolist()),
        "largest": scores.max().item(),
        "wave": torch.complex(scores, scores).sum().item(),
        "equal": torch.equal(batch["x"], batch["x"].relu()),
        "close": torch.allclose(scores, scores * (1 + 1e-9)),
        "known": batch["x"].shape[0],
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Numbers are of the same class, and agree."""
    flat, _ = torch.utils._pytree.tree_flatten({**found, "loss": found["loss"].item()})
    other, _ = torch.utils._pytree.tree_flatten({**expected, "loss": expected["loss"].item()})
    assert list(map(type, flat)) == list(map(type, other))
    assert flat == pytest.approx(other, rel=1e-10)


STRATEGIES = {
    "whole": ([0], weft.Strategy()),
    "data parallel": ([0, 1], weft.data_parallel()),
    "split weights": ([0, 1], weft.Strategy(parameters={"0.*": weft.split(0)})),
    "micro-batches": ([0, 1], weft.Strategy(batch={"*": weft.split(0)}, micro_batches=2)),
    "two stages": ([0, 1], weft.Strategy(stages=2, micro_batches=2)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_step_returns_the_numbers_of_a_single_device(name: str) -> None:
    plain = net()
    optimizer = adamw(plain)
    grid, strategy = STRATEGIES[name]
    with compiled(plain, measured, batch(), grid, strategy) as program:
        for seed in (1, 2):
            expected = measured(plain, batch(seed=seed))
            assert_same(program.step(batch(seed=seed), update=seed == 1), expected)
            expected["loss"].backward()
            optimizer.step()


def test_other_shapes_and_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    light: list[bool] = []
    traced = retrace.retrace

    def noted(*args: Any) -> Any:
        found = traced(*args)
        light.append(found is not None)
        return found

    monkeypatch.setattr("weft.capture.fx.private.retrace", noted)
    plain = net()
    with compiled(plain, measured, batch(), [0, 1], weft.data_parallel()) as program:
        evaluation = program.evaluation(lambda m, x: measured(m, x)["accuracy"], batch())
        for rows in (8, 6):
            expected = measured(plain, batch(rows))
            assert evaluation.step(batch(rows)) == expected["accuracy"]
        assert_same(program.step(batch(6)), expected)
        evaluation.close()
    assert light  # tried for both
    assert all(light)


def test_numbers_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(leaf: Any, values: Any) -> Any:
        return (
            values[leaf.key].item() * 1.001
            if leaf == outputs.Number("same")
            else given(leaf, values)
        )

    given = outputs._given
    with compiled(net(), measured, batch(), [0, 1], weft.data_parallel()) as program:
        names = {each.name for each in program.verify(batch()).compared if each.kind == "output"}
        assert {"same", "accuracy", "others[2][0]", "equal", "known"} <= names
        monkeypatch.setattr(outputs, "_given", larger)
        with pytest.raises(VerificationError, match="same"):
            program.verify(batch())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not tell what it tests")
@pytest.mark.parametrize("kind", ["item", "equal", "allclose"])
def test_a_truth_test_that_only_raises_is_checked_in_every_step(kind: str) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        if kind == "item":
            assert (x < 9).all().item()
        elif kind == "equal" and not torch.equal(x, x.clamp(max=9)):
            raise ValueError("larger than 9")
        elif kind == "allclose":
            assert torch.allclose(x, x.clamp(max=9))
        return model(x).square().mean()

    good = batch()
    bad = {**good, "x": good["x"].index_fill(0, torch.tensor([7]), 10.0)}
    with compiled(net(), loss, good, [0, 1], weft.data_parallel()) as program:
        program.step(good)
        with pytest.raises(RankFailure, match="the step fails a check"):
            program.step(bad)
