"""A cross-entropy's two backwards become one op; what it cannot stand for stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import weft
from build import ref, value
from contexts import NOTHING
from local_programs import program
from single_device import assert_same_training, compiled, plain_training
from weft.compiler.decompositions import fused_losses
from weft.compiler.decompositions.fused_losses import join_losses
from weft.ir.logical import Phase
from weft.ir.plan import LocalCall, LocalProgram, LocalValue

JOINED = "weft.cross_entropy_backward"


@pytest.fixture(autouse=True)
def small_scores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_losses, "SMALLEST", 15)


def calls(kind: int = 2, dtype: str = "float32", shape: tuple[int, ...] = (3, 5)) -> list[Any]:
    """Log-probabilities and the two backwards of their loss."""
    y, dense, made = (LocalValue(name, shape, dtype) for name in ("y", "dense", "made"))
    backward = Phase(0, "backward")
    args = (ref("v"), ref("y"), ref("x"), None, kind, -100, ref("w"))
    softmax = (ref("dense"), ref("y"), -1, 6)
    return [
        LocalCall.of("aten._log_softmax.default", (ref("v"), 1, False), (y,)),
        LocalCall.of("aten.nll_loss_backward.default", args, (dense,), backward),
        LocalCall.of("aten._log_softmax_backward_data.default", softmax, (made,), backward),
    ]


def ops(local: LocalProgram) -> list[str]:
    return [node.op for node in local.nodes if isinstance(node, LocalCall)]


def test_two_become_one() -> None:
    joined = join_losses(program(calls(), ("made",)), NOTHING)
    assert ops(joined) == ["aten._log_softmax.default", JOINED]
    (made,) = joined.nodes[1].makes
    assert made == LocalValue("made", (3, 5), "float32")
    assert joined.nodes[1].reads == {"v", "y", "x", "w"}


@pytest.mark.parametrize(
    "kept",
    [
        program(calls(), ("made", "dense")),  # read elsewhere
        program(calls(kind=1), ("made",)),  # a mean
        program(calls(dtype="bfloat16"), ("made",)),
        program(calls(shape=(15,)), ("made",)),
        program(calls(shape=(2, 7)), ("made",)),
    ],
    ids=["read", "mean", "narrow", "vector", "small"],
)
def test_others_stay(kept: LocalProgram) -> None:
    assert join_losses(kept, NOTHING) is kept


def test_another_softmax_stays() -> None:
    first, loss, softmax = calls()
    other = LocalCall.of(softmax.op, (ref("dense"), ref("z"), 1, 6), softmax.outputs, loss.phase)
    kept = program([first, loss, other], ("made",))
    assert value("z") not in kept.values.values()
    assert join_losses(kept, NOTHING) is kept


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.register_buffer("weights", torch.rand(30))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.token(tokens)).flatten(0, 1)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"].flatten(), ignore_index=3)


def weighted(model: nn.Module, batch: Any) -> Tensor:
    target = batch["y"].flatten()
    return functional.cross_entropy(model(batch["x"]), target, model.weights, ignore_index=3)


def each(model: nn.Module, batch: Any) -> Tensor:
    losses = functional.cross_entropy(model(batch["x"]), batch["y"].flatten(), reduction="none")
    return losses.square().mean()


@pytest.mark.parametrize("loss", [mean, weighted, each])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_equals_one_device(loss: Any, micro_batches: int) -> None:
    torch.manual_seed(0)
    model = Classes().double()
    batches = [
        {key: torch.randint(30, (4, 6)) for key in "xy"} | {"y": torch.arange(24).view(4, 6) % 7}
        for _ in range(3)
    ]
    strategy = weft.Strategy(batch={"*": weft.split(0)}, micro_batches=micro_batches)
    expected = plain_training(model, loss, batches)
    with compiled(model, loss, batches[0], [0, 1], strategy) as made:
        assert JOINED in str(made.plan)
        assert "aten.nll_loss_backward" not in str(made.plan)
        assert_same_training(made, batches, expected)
