"""A cross-entropy on shards of the classes against torch's on all of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from weft.runtime.kernels import loss_ops as class_ops

SHARDS = ((0, 5), (5, 4))  # offset and number of the classes of two ranks


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("at_a_time", [1, 20, 2**17])
def test_shards_make_up_the_whole(monkeypatch, reduction, at_a_time):
    monkeypatch.setattr(class_ops, "ELEMENTS_AT_A_TIME", at_a_time)
    x = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 8, -100, 4, 5, 2, 7])
    loss = cross_entropy(x, target, reduction=reduction)
    grad = torch.randn_like(loss)
    (wanted,) = torch.autograd.grad(loss, x, grad)

    logits, number = x.detach(), {"none": 0, "sum": 2}[reduction]
    parts = [logits[:, offset : offset + count] for offset, count in SHARDS]
    top = logits.amax(1, keepdim=True)
    sums = sum(class_ops.sum_exp(part, top, 1) for part in parts)
    torch.testing.assert_close(sums, (logits - top).exp().sum(1, keepdim=True))
    rest = (top + sums.log(), target)
    losses, found = 0.0, []
    for part, (offset, _) in zip(parts, SHARDS, strict=True):
        made, count = class_ops.class_loss(part, *rest, number, -100, offset)
        losses = losses + made
        assert count == (
            ((target >= offset) & (target < offset + part.shape[1])).sum() * number / 2
        )
        found.append(class_ops.class_loss_backward(grad, part, *rest, number, -100, offset))
    torch.testing.assert_close(losses, loss.detach())
    torch.testing.assert_close(torch.cat(found, 1), wanted)


def test_sums_along_any_dimension():
    x = torch.randn(3, 5, 2, dtype=torch.float64)
    top = x.amax(1, keepdim=True)
    expected = (x - top).exp().sum(1, keepdim=True)
    torch.testing.assert_close(class_ops.sum_exp(x, top, 1), expected)


@pytest.mark.parametrize(("device", "launches"), [("cpu", 4), ("meta", 1)])
def test_only_a_cpu_takes_a_few_rows_at_a_time(device, launches):
    x = torch.empty(4, 2**17, device=device)
    assert len(list(class_ops.rows_at_a_time(x))) == launches


@pytest.fixture
def columns_pay(monkeypatch):
    monkeypatch.setattr(class_ops, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(class_ops, "_MANY_COLUMNS", 40)
    monkeypatch.setattr(class_ops, "ELEMENTS_AT_A_TIME", 7 * 32)


@pytest.mark.usefixtures("columns_pay")
def test_scores_of_few_rows_and_their_gradient_lie_by_columns():
    x, weight = torch.randn(32, 6), torch.randn(50, 6)
    scores = class_ops.class_scores(x, weight.t())
    torch.testing.assert_close(scores, x @ weight.t())
    assert scores.stride() == (1, 32)

    rows = scores.contiguous()
    top, lse = rows.amax(1, keepdim=True), rows.logsumexp(1, keepdim=True)
    sums = class_ops.sum_exp(scores, top, 1)
    torch.testing.assert_close(sums, (rows - top).exp().sum(1, keepdim=True))
    rest = (lse, torch.arange(32) * 3 - 20, 2, -20, 5)  # ignored, before, among and after
    for found, wanted in zip(
        class_ops.class_loss(scores, *rest), class_ops.class_loss(rows, *rest), strict=True
    ):
        torch.testing.assert_close(found, wanted)
    gradient = class_ops.class_loss_backward(torch.tensor(0.5), scores, *rest)
    torch.testing.assert_close(
        gradient, class_ops.class_loss_backward(torch.tensor(0.5), rows, *rest)
    )
    assert gradient.stride() == (1, 32)
    # The product that makes the weight's gradient reads rows.
    assert gradient.t().is_contiguous()


@pytest.mark.usefixtures("columns_pay")
@pytest.mark.parametrize(
    ("rows", "classes", "dtype", "turned"),
    [
        (31, 50, torch.float32, True),
        (129, 50, torch.float32, True),
        (32, 39, torch.float32, True),
        (32, 50, torch.float64, True),
        (32, 50, torch.float32, False),
    ],
)
def test_other_scores_lie_by_rows(rows, classes, dtype, turned):
    x, weight = torch.randn(rows, 6, dtype=dtype), torch.randn(6, classes, dtype=dtype)
    weight = weight.t().contiguous().t() if turned else weight
    scores = class_ops.class_scores(x, weight)
    torch.testing.assert_close(scores, x @ weight)
    assert scores.is_contiguous()


@pytest.mark.parametrize("by_columns", [False, True])
def test_pieces_are_in_one_place(monkeypatch, by_columns):
    monkeypatch.setattr(class_ops, "ELEMENTS_AT_A_TIME", 12)
    x = torch.zeros(5, 6).t() if by_columns else torch.zeros(6, 5)
    pieces = [x[part] for part in class_ops._pieces(x)]
    for piece in pieces:
        assert (piece.t() if by_columns else piece).is_contiguous()
        piece += 1
    assert len(pieces) == 3
    assert torch.equal(x, torch.ones(6, 5))
