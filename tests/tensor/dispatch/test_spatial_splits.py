"""Convolutions and poolings of images that are split in height or width: borders are exchanged, nothing gathered."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import weft
from weft.layout import Split

S = weft.split
GRID = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("ranks", "sbp"),
    [([0, 1], S(2)), ([0, 1, 2], S(3)), (GRID, (S(0), S(2))), (GRID, (S(2), S(3)))],
)
def test_borders_are_exchanged(ranks, sbp):
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GELU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.AvgPool2d(2),
    ).double()
    images = torch.randn(3, 2, 17, 28, dtype=torch.float64)
    plain(images).pow(2).sum().backward()
    with weft.local_world(4):
        placement = weft.placement("cpu", ranks)
        ours = weft.distribute(copy.deepcopy(plain), placement)
        ours.zero_grad()
        x = weft.tensor(images, placement=placement, sbp=sbp)
        with weft.strict_boxing():  # the borders belong to the ops
            out = ours(x)
        assert out.sbp == x.sbp
        assert all(isinstance(each, Split) for each in out.sbp)
        torch.testing.assert_close(out.full(), plain(images), rtol=1e-12, atol=1e-12)
        out.pow(2).sum().backward()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full(), theirs.grad, rtol=1e-12, atol=1e-12)
