"""A cross-entropy on shards of the classes against torch's on all of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from weft.runtime import class_ops

SHARDS = ((0, 5), (5, 4))  # offset and number of the classes of two ranks


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("at_a_time", [1, 20, 2**17])
def test_shards_make_up_the_whole(monkeypatch, reduction, at_a_time):
    monkeypatch.setattr(class_ops, "_AT_A_TIME", at_a_time)
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
    assert len(list(class_ops._rows(x))) == launches
