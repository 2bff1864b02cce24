"""Kernels of mixtures of experts against what they mean, row by row."""

from __future__ import annotations

import pytest
import torch

from ops.draw import GENERATOR
from ops.samples_experts import FAMILIES
from tools.oracles.experts import CHECKS
from weft.errors import UserError
from weft.runtime.kernels.own_ops import EXPERT_OPS, routes


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_kernels_do_what_the_ops_mean(family: object) -> None:
    GENERATOR.manual_seed(3)
    for sample in family():  # type: ignore[operator]
        expected = CHECKS[sample.op](*sample.args)
        found = EXPERT_OPS[sample.op](*sample.args)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_part_of_the_blocks(first: int, each: int) -> None:
    """What a rank of some blocks gets and gives back, of rows that all ranks hold."""
    ids = torch.tensor([0, 3, 5, 1, 1, 4, 5, -1])
    places = routes(ids, 6, 2, 3, 2)
    for op, given in (("dispatch", (2, 1, 2, 0, first)), ("combine", (2, 2, first))):
        x = torch.randn(8 // each, 3) if op == "dispatch" else torch.randn(1, 4, 3)
        args = (x, places, *given, each)
        torch.testing.assert_close(EXPERT_OPS[f"weft.{op}"](*args), CHECKS[f"weft.{op}"](*args))


def test_what_goes_comes_back() -> None:
    ids = torch.tensor([5, 0, 0, 2, 4, 6, 1, 3])  # 6 is no expert
    x = torch.randn(8, 3)
    places = routes(ids, 6, 2, 3, 3)
    z = EXPERT_OPS["weft.dispatch"](x, places, 2, 3, 3, 0, 0, 1)
    back = EXPERT_OPS["weft.combine"](z, places, 2, 3, 0, 1)
    torch.testing.assert_close(back, x * (ids < 6).unsqueeze(1))


def test_full_buffers_raise() -> None:
    ids = torch.tensor([0, 0, 1, 0, 2, 3, 2, 3])
    assert routes(ids, 4, 2, 2, 4).tolist() == [0, 1, 3, 2, 4, 6, 5, 7]
    with pytest.raises(
        UserError, match=r"4 rows .*, of its 4; the buffers hold 3.*capacity=2\) or more"
    ):
        routes(ids, 4, 2, 2, 3)


def test_no_rows() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    made = EXPERT_OPS["weft.expert_mm"](torch.empty(0, 3), torch.randn(2, 3, 5), empty, 0)
    assert made.shape == (0, 5)
    gradient = EXPERT_OPS["weft.expert_gradient"](torch.empty(0, 3), torch.empty(0, 5), empty, 2, 0)
    torch.testing.assert_close(gradient, torch.zeros(2, 3, 5))
