"""Matrices that cannot be factorized raise in a compiled step, as they do in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import RankFailure

S, B = weft.split, weft.broadcast
EYE = torch.eye(3, dtype=torch.float64)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.linalg.inv": torch.linalg.inv,
    "torch.linalg.solve": lambda x: torch.linalg.solve(x, torch.ones_like(x)),
    "torch.linalg.solve.vector": lambda x: torch.linalg.solve(x, torch.ones_like(x[..., 0])),
    "torch.linalg.cholesky": torch.linalg.cholesky,
    "torch.linalg.lu_factor": lambda x: torch.linalg.lu_factor(x)[0],
}


class Matrix(nn.Module):
    """A weight of the size of one matrix, added to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def compiled(function: Callable[[Tensor], Tensor], x: Tensor, sbp: Any) -> Any:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return function(model(batch["x"])).sum()

    model = Matrix()
    return weft.compile(
        model,
        loss_fn,
        torch.optim.SGD(model.parameters(), lr=0.0),
        {"x": x},
        placement=weft.placement("cpu", [0, 1]),
        strategy=weft.Strategy(batch={"*": sbp}),
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("batch", [(), (4,), (1,)])
def test_a_singular_matrix_raises_on_its_rank(name: str, batch: tuple[int, ...]) -> None:
    good = EYE.expand(*batch, 3, 3).clone()
    bad = good.clone()
    bad.reshape(-1, 9)[-1] = 0  # the last of the batch: the second rank's
    with weft.local_world(2):
        program = compiled(FUNCTIONS[name], good, S(0) if batch else B)
        assert float(program.step({"x": good})) == float(FUNCTIONS[name](good).sum())
        with pytest.raises(RankFailure, match="LinAlgError|RuntimeError") as failure:
            program.step({"x": bad})
    assert name.removesuffix(".vector").split(".", 1)[1].split("_")[0] in str(failure.value)


def test_the_unchecked_form_does_not_raise() -> None:
    with weft.local_world(2):
        program = compiled(lambda x: torch.linalg.inv_ex(x)[0], EYE, B)
        assert not torch.isfinite(program.step({"x": torch.zeros_like(EYE)}))


def test_eager_tensors_raise_too() -> None:
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2):
        x = weft.tensor(torch.zeros_like(EYE), placement=placement, sbp=B)
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):  # type: ignore[attr-defined]
            torch.linalg.inv(x)
