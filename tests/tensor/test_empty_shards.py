"""Splits that leave ranks empty: eager ops go on with them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft

S, P = weft.split, weft.partial


pytestmark = pytest.mark.usefixtures("world")


def test_ranks_without_elements_stay_so():
    """A batch of 3 on 4 ranks is never gathered: the last rank runs on nothing."""
    torch.manual_seed(0)
    line = weft.placement("cpu", [0, 1, 2, 3])
    whole = torch.randn(3, 8, dtype=torch.float64)
    x = weft.tensor(whole, placement=line, sbp=S(0))
    cases = {
        "scaled": lambda x: x * 2.5 + torch.add(x, x, alpha=3.0),
        "mean": lambda x: x.mean(0),
        "largest": lambda x: x.amax(0),
        "rows": lambda x: F.layer_norm(x, (8,)).softmax(1).view(3, 2, 4).transpose(1, 2),
    }
    with weft.strict_boxing():
        found = {name: case(x) for name, case in cases.items()}
    for name, case in cases.items():
        torch.testing.assert_close(found[name].full(), case(whole), rtol=1e-12, atol=1e-12)
    assert found["rows"].sbp == (S(0),)
    assert found["rows"].shards()[3].numel() == 0
    assert found["largest"].sbp == (P("max"),)


def test_training_on_ranks_without_elements():
    torch.manual_seed(0)
    line = weft.placement("cpu", [0, 1, 2, 3])
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()
    ours = weft.distribute(copy.deepcopy(plain), line)
    batch, labels = torch.randn(3, 8, dtype=torch.float64), torch.tensor([0, 1, 3])
    x, y = (weft.tensor(value, placement=line, sbp=S(0)) for value in (batch, labels))
    for model, given, wanted in ((plain, batch, labels), (ours, x, y)):
        out = model(given)
        F.cross_entropy(out, wanted).backward()
    assert out.sbp == (S(0),)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full(), theirs.grad, rtol=1e-12, atol=1e-12)
