"""Dtypes that torch's kernels refuse are refused when the step is captured, with the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weft.capture import capture
from weft.errors import CaptureError

ROWS, CLASSES = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
IMAGES, CELLS = torch.ones(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)


def scores(model: nn.Module, batch: Any) -> Any:
    return model(batch).double().sum()


def classes(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(torch.ones(*batch.shape[:1], 8)), batch)


def cells(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(torch.ones(2, 3, 4, 4)), batch)


def likelihood(model: nn.Module, batch: Any) -> Any:
    return F.binary_cross_entropy(model(torch.ones(4, 8))[:, 0].sigmoid(), batch)


def logits(model: nn.Module, batch: Any) -> Any:
    return F.binary_cross_entropy_with_logits(model(torch.ones(4, 8))[:, 0], batch)


def added(model: nn.Module, batch: Any) -> Any:
    return model(torch.ones(4, 8)).index_add(0, CLASSES, batch).sum()


@pytest.mark.parametrize(
    ("model", "loss_fn", "batch"),
    [
        (nn.Linear(8, 2), scores, ROWS.double()),
        (nn.Linear(8, 2), scores, ROWS.long()),
        (nn.Linear(8, 2, bias=False), scores, ROWS.double()),
        (nn.ConvTranspose2d(3, 2, 3), scores, IMAGES.double()),
        (nn.LayerNorm(8), scores, ROWS.double()),
        (nn.BatchNorm1d(8), scores, ROWS.double()),
        (nn.GroupNorm(1, 3), scores, IMAGES.double()),
        (nn.Linear(8, 2), classes, CLASSES.int()),
        (nn.Conv2d(3, 2, 1), cells, CELLS.int()),
        (nn.Linear(8, 2), likelihood, CLASSES),
        (nn.Linear(8, 2), logits, CLASSES),
        (nn.Linear(8, 2), added, torch.ones(4, 2).double()),
    ],
)
def test_what_kernels_refuse(model: nn.Module, loss_fn: Callable[..., Any], batch: Any):
    with pytest.raises(RuntimeError):
        loss_fn(model, batch)
    with pytest.raises(CaptureError, match=r"test_dtypes\.py:\d+: .*\n  the op .* takes .*, got "):
        capture(model, loss_fn, torch.optim.SGD(model.parameters()), batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_16_bits_with_float32_parameters(dtype: torch.dtype):
    model = nn.LayerNorm(8)
    scores(model, ROWS.to(dtype)).backward()
    capture(model, scores, torch.optim.SGD(model.parameters()), ROWS.to(dtype))


def test_targets_of_another_floating_dtype():
    model = nn.Linear(8, 2)
    logits(model, CLASSES.double()).backward()
    capture(model, logits, torch.optim.SGD(model.parameters()), CLASSES.double())


@pytest.mark.parametrize(
    ("call", "batch"),
    [
        (nn.Softmax(1), ROWS.long()),
        (nn.GELU(), ROWS.int()),
        (nn.AvgPool2d(2), IMAGES.bool()),
        (nn.AdaptiveMaxPool2d(1), IMAGES.long()),
    ],
)
def test_kernels_of_floating_point_get_no_whole_numbers(
    call: Callable[[Any], Any], batch: torch.Tensor
):
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return model(torch.ones(4, 8)).sum() + call(batch).sum()

    model = nn.Linear(8, 2)
    with pytest.raises(RuntimeError):
        loss_fn(model, batch)
    with pytest.raises(CaptureError, match=r"(?s)test_dtypes\.py.*floating-point numbers, got"):
        capture(model, loss_fn, torch.optim.SGD(model.parameters()), batch)


def test_whole_numbers_pass_where_kernels_take_them():
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        counts = (batch.view(-1, 1) == batch).sum(1)
        return (model(torch.ones(4, 8)) * (counts.clamp(min=1)[:, None] // 2)).sum()

    model = nn.Linear(8, 2)
    loss_fn(model, CLASSES)
    capture(model, loss_fn, torch.optim.SGD(model.parameters()), CLASSES)


def test_a_user_s_kernel_is_not_tried_on_values_that_no_batch_has():
    @torch.library.custom_op("test_dtypes::looked_up", mutates_args=())
    def looked_up(numbers: torch.Tensor) -> torch.Tensor:
        return torch.tensor([{7: 1.0}[each] for each in numbers.tolist()])

    @looked_up.register_fake
    def _(numbers: torch.Tensor) -> torch.Tensor:
        return torch.empty(numbers.shape)

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return (model(torch.ones(4, 8)) * looked_up(batch)[:, None]).sum()

    model = nn.Linear(8, 2)
    batch = CLASSES + 7
    loss_fn(model, batch)
    capture(model, loss_fn, torch.optim.SGD(model.parameters()), batch)
