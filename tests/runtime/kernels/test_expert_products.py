"""Products of rows with the matrices of their experts, whether the rows of an expert stand together or not."""

from __future__ import annotations

import pytest
import torch

from weft.runtime.kernels.own_ops import RUNS, _keys, _runs_of, expert_gradient, expert_mm

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
