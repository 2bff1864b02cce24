"""CTC losses, split over the batch: lengths as tensors or numbers, targets in rows or one behind the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from single_device import assert_same_training, compiled, plain_training
from weft.errors import RankFailure

pytestmark = pytest.mark.usefixtures("double_precision")

STEPS, BATCH, CLASSES = 7, 4, 5
INPUTS, LENGTHS = (7, 6, 7, 3), (3, 2, 1, 0)
# Of 3 frames for 4 labels there is no way: the loss is infinite.
TOO_LONG = (3, 2, 1, 4)


def a_batch(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    torch.manual_seed(0)
    rows = torch.randint(1, CLASSES, (BATCH, 4))
    return {
        "x": torch.randn(BATCH, STEPS, 6),
        "rows": rows,
        "behind": torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)]),
        "inputs": torch.tensor(INPUTS),
        "lengths": torch.tensor(lengths),
    }


def loss_of(kind: str, numbers: bool, **options: Any) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        lengths = (INPUTS, LENGTHS) if numbers else (batch["inputs"], batch["lengths"])
        return F.ctc_loss(scores, batch[kind], *lengths, **options).square().sum()

    return loss


def check(loss: Callable[..., Tensor], batch: dict[str, Tensor], strategy: weft.Strategy) -> None:
    torch.manual_seed(1)
    model = nn.Linear(6, CLASSES)
    expected = plain_training(model, loss, [batch] * 2)
    with compiled(model, loss, batch, [0, 1], strategy) as program:
        assert_same_training(program, [batch] * 2, expected)


@pytest.mark.parametrize("kind", ["rows", "behind"])
@pytest.mark.parametrize("numbers", [False, True], ids=["tensors", "numbers"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lengths_and_targets_of_both_kinds(kind: str, numbers: bool, reduction: str) -> None:
    strategy = weft.Strategy(batch={"x": weft.split(0)})
    check(loss_of(kind, numbers, reduction=reduction), a_batch(), strategy)


@pytest.mark.parametrize("kind", ["rows", "behind"])
def test_infinite_losses_count_as_zero(kind: str) -> None:
    batch = a_batch(TOO_LONG)
    strategy = weft.Strategy(batch={"x": weft.split(0)})
    check(loss_of(kind, False, zero_infinity=True, blank=0), batch, strategy)


@pytest.mark.parametrize("kind", ["rows", "behind"])
def test_infinite_losses(kind: str) -> None:
    """Longer than there are steps: what is cut off changes neither the losses nor where gradients are nan."""
    long = (3, 2, 1, 4)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        scores = batch["x"][:, :2, :CLASSES].log_softmax(-1).transpose(0, 1).detach()
        with torch.enable_grad():
            scores.requires_grad_()
            inputs = batch["inputs"].clamp(max=2)
            losses = F.ctc_loss(scores, batch[kind], inputs, batch["lengths"], reduction="none")
            (gradient,) = torch.autograd.grad(losses.sum(), scores)
        return {"losses": losses.detach(), "gradient": gradient}

    batch, model = a_batch(long), nn.Linear(1, 1)
    expected = loss(model, batch)
    assert torch.isinf(expected["losses"]).any()
    with weft.local_world(2):
        placement = weft.placement("cpu", [0, 1])
        strategy = weft.Strategy(batch={"x": weft.split(0)})
        program = weft.compile(model, loss, None, batch, placement=placement, strategy=strategy)
        found = program.step(batch)
        program.close()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, equal_nan=True)


def test_micro_batches_and_a_single_sequence() -> None:
    strategy = weft.Strategy(batch={"*": weft.broadcast}, micro_batches=2)
    check(loss_of("rows", False), a_batch(), strategy)

    def single(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"][0]).log_softmax(-1)
        return F.ctc_loss(scores, batch["rows"][0], batch["inputs"][0], batch["lengths"][0] + 1)

    check(single, a_batch(), weft.Strategy())


def test_no_labels_at_all() -> None:
    batch = a_batch((0, 0, 0, 0))
    check(loss_of("behind", False), batch, weft.Strategy(batch={"x": weft.split(0)}))


def test_lengths_that_do_not_add_up() -> None:
    torch.manual_seed(1)
    batch, loss, model = a_batch(), loss_of("behind", False), nn.Linear(6, CLASSES)
    bad = {**batch, "lengths": batch["lengths"] - torch.tensor([1, 0, 0, 0])}
    failing = pytest.raises(RankFailure, match="must add up to 6")
    with compiled(model, loss, batch, [0, 1], weft.Strategy()) as program, failing:
        program.step(bad)
