"""What capture takes apart gives what the kernel gives, where torch's own decompositions do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from single_device import assert_same_training, compiled, plain_training
from tools.opinfo.decompositions import decomposition_problems
from tools.opinfo.samples import Case, cases, full_name, opinfos
from weft.capture.ops import decompositions as fallback

LABELS = torch.tensor(
    [[0, 3, -1, -1], [2, -1, -1, -1], [3, 2, 1, 0], [-1, 0, 1, 2], [1, -1, 2, -1]]
)
LOSSES: dict[str, Callable[..., Tensor]] = {
    "several labels": lambda x, y, reduction: F.multilabel_margin_loss(x, y, reduction=reduction),
    "one label": lambda x, y, reduction: F.multi_margin_loss(
        x, y[:, 0].clamp(min=0), p=2, margin=0.7, reduction=reduction
    ),
    "weights": lambda x, y, reduction: F.multi_margin_loss(
        x, y[:, 0].clamp(min=0), weight=torch.tensor([1.0, 0.5, 2, 3]), reduction=reduction
    ),
    "a single row": lambda x, y, reduction: F.multilabel_margin_loss(
        x[0], y[0], reduction=reduction
    ),
    "a single label": lambda x, y, reduction: F.multi_margin_loss(
        x[0], y[0, :1], reduction=reduction
    ),
}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_margin_losses(name: str, reduction: str) -> None:
    torch.manual_seed(0)
    function = LOSSES[name]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return function(model(batch["x"]), batch["labels"], reduction).square().sum()

    model, batches = nn.Linear(4, 4), [{"x": torch.randn(5, 4), "labels": LABELS}] * 3
    expected = plain_training(model, loss, batches)
    with compiled(model, loss, batches[0], [0, 1], weft.data_parallel()) as program:
        assert_same_training(program, batches, expected)


OPS = """
    nn.functional.multilabel_margin_loss nn.functional.multi_margin_loss index_fill linspace
    nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.binary_cross_entropy
    addr aminmax isin renorm rot90 std_mean var_mean trace nn.functional.max_unpool2d
    nn.functional.channel_shuffle nn.functional.interpolate.nearest special.log_ndtr"""
BY_NAME = {full_name(info): info for info in opinfos()}


@pytest.mark.parametrize("name", OPS.split())
def test_decompositions_give_what_kernels_give(name: str) -> None:
    assert [line for case in cases(BY_NAME[name], 4) for line in decomposition_problems(case)] == []


def test_a_wrong_decomposition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    core = dict(fallback._core())
    wrong: dict[Any, Any] = {torch.ops.aten.trace.default: lambda x: x.diagonal().sum() + 1}
    monkeypatch.setattr(
        "tools.opinfo.decompositions.table", lambda: {**core, **wrong}, raising=True
    )
    case = Case("trace", (torch.randn(7, 9),), (False,), lambda given: given[0].trace(), "7 x 9")
    assert "aten.trace.default differs from its kernel" in next(decomposition_problems(case))


def test_integers_of_a_range_are_those_of_the_kernel() -> None:
    def loss(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"steps": torch.linspace(0, 7, 50, dtype=torch.int64) + batch}

    batch = torch.zeros(50, dtype=torch.int64)
    with weft.local_world(2):
        placement = weft.placement("cpu", [0, 1])
        program = weft.compile(nn.Linear(1, 1), loss, None, batch, placement=placement)
        assert torch.equal(program.step(batch)["steps"], loss(nn.Linear(1, 1), batch)["steps"])
        program.close()


def test_indices_may_count_from_the_end() -> None:
    def loss(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"filled": batch.index_fill(1, torch.tensor([0, -1]), batch.sum())}

    batch = torch.randn(4, 6)
    with weft.local_world(2):
        placement = weft.placement("cpu", [0, 1])
        program = weft.compile(nn.Linear(1, 1), loss, None, batch, placement=placement)
        found = program.step(batch)["filled"]
        torch.testing.assert_close(found, loss(nn.Linear(1, 1), batch)["filled"])
        program.close()
