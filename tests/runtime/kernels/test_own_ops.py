"""Kernels of mixtures of experts against what they mean, row by row."""

from __future__ import annotations

import pytest
import torch

from ops.draw import GENERATOR
from ops.samples_experts import FAMILIES
from tools.oracles.meanings import CHECKS
from weft.errors import UserError
from weft.runtime.kernels.own_ops import (
    EXPERT_OPS,
    RUNS,
    _keys,
    _runs_of,
    expert_gradient,
    expert_mm,
    routes,
)


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


# Products of rows with the matrices of their experts, whether the rows of an expert stand together or not.

ROWS, EXPERTS = 200, 4


def some_ids(kind: str) -> torch.Tensor:
    """Of 200 rows to experts 2 to 5; expert 4 has none, and -1 and 9 are not among them."""
    torch.manual_seed(0)
    ids = torch.tensor([2, 3, 5, -1, 9])[torch.randint(5, (ROWS,))]
    if kind == "scattered":
        return ids
    return (
        ids.sort().values
        if kind == "sorted"
        else torch.cat([half.sort().values for half in ids.chunk(2)])
    )


@pytest.mark.parametrize("kind", ["scattered", "sorted", "in two runs"])
def test_products_of_experts(kind: str) -> None:
    ids = some_ids(kind)
    together = _runs_of(_keys(ids, EXPERTS, 2), EXPERTS) is not None
    assert together == (kind != "scattered")
    x, g = torch.randn(ROWS, 3, dtype=torch.float64), torch.randn(ROWS, 5, dtype=torch.float64)
    w = torch.randn(EXPERTS, 3, 5, dtype=torch.float64)
    product = torch.zeros(ROWS, 5, dtype=torch.float64)
    gradient = torch.zeros_like(w)
    for row, number in enumerate((ids - 2).tolist()):
        if 0 <= number < EXPERTS:
            product[row] = x[row] @ w[number]
            gradient[number] += torch.outer(x[row], g[row])
    torch.testing.assert_close(expert_mm(x, w, ids, 2), product)
    torch.testing.assert_close(expert_gradient(x, g, ids, EXPERTS, 2), gradient)


def test_without_rows() -> None:
    ids = torch.empty(0, dtype=torch.int64)
    assert expert_mm(torch.ones(0, 3), torch.ones(2, 3, 5), ids, 0).shape == (0, 5)
    assert not expert_gradient(torch.ones(0, 3), torch.ones(0, 5), ids, 2, 0).any()


def test_runs() -> None:
    runs = _runs_of(torch.tensor([1, 1, 0, 2, 2, 2]), 2)
    assert runs == [(1, slice(0, 2)), (0, slice(2, 3)), (2, slice(3, 6))]
    assert _runs_of(torch.arange(2 * RUNS + 1) % 2, 2) is None
