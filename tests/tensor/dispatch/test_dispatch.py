"""Ops on global tensors against the same ops on plain ones."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.tensor.dispatch import dispatch

S, B, P = weft.split, weft.broadcast, weft.partial
LINE = [0, 1, 2, 3]
GRIDS = {"2": [0, 1], "4": LINE, "2x2": [[0, 1], [2, 3]], "4, one empty": LINE}

OPS = {
    "add": lambda x, y: x + y,
    "subtract a scalar": lambda x, y: 3 - x * 0.5,
    "multiply": lambda x, y: x * y,
    "square": lambda x, y: x * x,
    "divide": lambda x, y: x / (y.abs() + 1),
    "compare": lambda x, y: (x > y).to(x.dtype),
    "matrix product": lambda x, y: x @ y.t(),
    "transposed": lambda x, y: x.t().contiguous(),
    "relu": lambda x, y: F.relu(x),
    "softmax": lambda x, y: F.softmax(x, 1),
    "log softmax": lambda x, y: F.log_softmax(x, 0),
    "layer norm": lambda x, y: F.layer_norm(x, (x.shape[1],)),
    "sum": lambda x, y: x.sum(0),
    "mean": lambda x, y: x.mean(),
    "variance": lambda x, y: x.var(1),
    "maximum": lambda x, y: x.amax(1),
    "arg max": lambda x, y: x.argmax(1),
    "norm": lambda x, y: torch.linalg.vector_norm(x),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "stack": lambda x, y: torch.stack([x, y]),
    "split": lambda x, y: x.split(2, 1)[1],
    "unbind": lambda x, y: x.unbind(0)[2],
    "slice": lambda x, y: x[1:4, ::2],
    "view": lambda x, y: (x + y).reshape(-1),
    "expand": lambda x, y: x[:, :1].expand(x.shape),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "masked fill": lambda x, y: x.masked_fill(y > 0, 2.5),
    "cumulative sum": lambda x, y: x.cumsum(0),
    "sorted": lambda x, y: x.sort(1).values,
    "mse": F.mse_loss,
    "no rule of its own": lambda x, y: torch.logcumsumexp(x, 1),
    "zeros like": lambda x, y: torch.zeros_like(x) + torch.ones_like(y),
}


def layouts(grid):
    one = [S(0), S(1), B, P()]
    return [(a,) for a in one] if grid != "2x2" else list(itertools.product(one, repeat=2))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("grid", GRIDS)
def test_ops_equal_plain_torch(grid, name):
    """On shapes that do not divide evenly, in every layout of the first operand."""
    op = OPS[name]
    generator = torch.Generator().manual_seed(1)
    rows = 3 if "empty" in grid else 6
    a, b = (torch.randn(rows, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = op(a, b)
    placement = weft.placement("cpu", GRIDS[grid])
    with weft.local_world(4):
        ys = (weft.tensor(b, placement=placement, sbp=sbp) for sbp in (S(0), B))
        for y, sbp in itertools.product(list(ys), layouts(grid)):
            x = weft.tensor(a, placement=placement, sbp=sbp)
            found = op(x, y)
            assert found.shape == expected.shape
            assert found.stride() == expected.stride()
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.full(), expected, msg=lambda m, x=x: f"{x.sbp}: {m}")


def test_results_lie_as_operands_do():
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2):

        def of(shape, sbp):
            return weft.randn(shape, placement=placement, sbp=sbp)

        x, w = of((8, 6), S(0)), of((6, 4), B)
        assert (x @ w).sbp == (S(0),)
        assert (of((8, 6), B) @ of((6, 4), S(1))).sbp == (S(1),)
        assert (of((8, 6), S(1)) @ of((6, 4), S(0))).sbp == (P(),)
        assert (w + w).sbp == (B,)
        assert (x + of((6,), B)).sbp == (S(0),)
        total = of((8, 6), S(1)) @ of((6, 4), S(0))
        assert (total * 0.5 + total).sbp == (P(),)
        # A reduce-scatter moves half of what an all-reduce does.
        assert F.relu(total).sbp == (S(0),)


def test_in_place_ops_write_the_parts():
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2), torch.no_grad():
        for sbp in (S(0), B, P()):
            x = weft.ones(5, 3, placement=placement, sbp=sbp)
            parts = x.shards()
            row = weft.arange(3.0, placement=placement, sbp=B)
            x.add_(row).mul_(2).sub_(1)
            x.copy_(x + 1)
            assert x.sbp == (sbp,)
            assert x.full().tolist() == [[2, 4, 6]] * 5
            assert parts[1] is x.shards()[1]
            x.fill_(4)
            x.clamp_(max=3)
            assert x.full().tolist() == [[3] * 3] * 5
            assert x.zero_().full().abs().sum() == 0


def test_decisions_are_made_once():
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2):
        x = weft.ones(7, placement=placement, sbp=S(0))
        counts = set()
        for number in (0.3, 0.7, 1e-3):
            assert x.addcdiv(x, x, value=number).full()[0].item() == pytest.approx(1 + number)
            counts.add(len(dispatch._known[id(torch.ops.aten.addcdiv.default)].recipes))
        assert len(counts) == 1


def test_cached_decisions_do_not_keep_numbers():
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2):
        x = weft.ones(2, placement=placement, sbp=S(0))
        found = [(x * f).full()[0].item() for f in (0.5, 0.25, -0.5, 2.0, 0.0, 1.0)]
        assert found == [0.5, 0.25, -0.5, 2, 0, 1]
        signs = [torch.signbit((x * f).full()[0]).item() for f in (0.0, -0.0)]
        assert signs == [False, True]
        total = weft.ones(2, placement=placement, sbp=P())
        assert [(total + f).full()[0].item() for f in (0.0, 0.5, -0.0, 2.0)] == [1, 1.5, 1, 3]
        assert (x + 1).dtype == torch.float32
        assert (x > True).dtype == torch.bool


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        ([1000.25, -1000.0], torch.bfloat16),
        ([6e4, 6e4, -6e4, -6e4], torch.float16),
        ([-1.0] * 8, torch.int8),
        ([-1.0] * 8, torch.int16),
    ],
)
def test_sums_are_rounded_after_they_are_summed(x: list[float], dtype: torch.dtype) -> None:
    """Rounding the parts would lose what cancels; of integers the neutral element of a maximum has no place."""
    every = torch.tensor(x)[:, None]
    for ranks in (2, 4):
        with weft.local_world(ranks):
            placement = weft.placement("cpu", list(range(ranks)))
            total = weft.tensor(every, placement=placement, sbp=weft.split(0)).sum(0)
            assert total.sbp == (weft.partial(),)
            assert torch.equal(total.to(dtype).full(), every.sum(0).to(dtype))
            into = weft.zeros(1, dtype=dtype, placement=placement, sbp=weft.broadcast)
            assert torch.equal(into.copy_(total).full(), every.sum(0).to(dtype))
