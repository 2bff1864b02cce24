"""The backward of a cross-entropy as one op, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import nll_loss

from weft.runtime.kernels import loss_ops as class_ops
from weft.runtime.kernels.loss_ops import cross_entropy_backward, log_softmax_over


@pytest.mark.parametrize("at_a_time", [1, 20, 2**17])
@pytest.mark.parametrize("weight", [None, torch.rand(9, dtype=torch.float64)])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_equals_torch(monkeypatch, reduction, weight, at_a_time):
    monkeypatch.setattr(class_ops, "ELEMENTS_AT_A_TIME", at_a_time)
    x = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 8, -100, 4, 5, 2, 7])
    scores = x.log_softmax(1)
    loss = nll_loss(scores, target, weight, reduction=reduction)
    grad = torch.randn_like(loss)
    (wanted,) = torch.autograd.grad(loss, x, grad)
    number = {"none": 0, "sum": 2}[reduction]
    found = cross_entropy_backward(
        grad, scores.detach(), target, weight, number, -100, x.new_ones(())
    )
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-15)


def test_what_is_ignored_hides_what_is_not_finite():
    grad = torch.tensor([1.0, torch.inf])
    scores = torch.zeros(2, 3).log_softmax(1)
    found = cross_entropy_backward(grad, scores, torch.tensor([0, 5]), None, 0, 5, torch.ones(()))
    assert found[1].tolist() == [0, 0, 0]
    assert found[0].tolist() == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 70_000), (700, 33), (1, 9)])
def test_what_is_written_over_is_the_same(shape, dtype):
    logits = torch.randn(shape, dtype=dtype) * 5
    scores = logits.log_softmax(1)
    memory = logits.data_ptr()
    found = log_softmax_over(logits, 1, False)
    assert torch.equal(found, scores)
    target = torch.arange(shape[0]) % shape[1]
    target[0] = -100
    rest = (target, None, 2, -100, torch.tensor(3.0, dtype=dtype))
    expected = cross_entropy_backward(torch.tensor(0.5, dtype=dtype), scores, *rest)
    found = cross_entropy_backward(torch.tensor(0.5, dtype=dtype), found, *rest, over=True)
    assert torch.equal(found, expected)
    assert found.data_ptr() == memory


def test_logits_out_of_order_are_not_written_over():
    logits = torch.randn(6, 5).t()
    expected, before = logits.log_softmax(1), logits.clone()
    assert torch.equal(log_softmax_over(logits, 1, False), expected)
    assert torch.equal(logits, before)
