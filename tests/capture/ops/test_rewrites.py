"""Functions of torch that read values only to check them, or to find shapes: the same numbers, and the same errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from single_device import assert_same_training, compiled, plain_training
from weft.capture import capture
from weft.errors import CaptureError, RankFailure

pytestmark = pytest.mark.usefixtures("double_precision")

Function = Callable[[Tensor, dict[str, Tensor]], Tensor]
WEIGHTS = torch.tensor([1, 2, 0, 1, 3, 1])
PARTS = torch.tensor([0.5, 1.0, 0.2, 0.3, 0.9, 0.4], dtype=torch.float64)
MASK = torch.tensor([True, False, True, True, False, False])


def put(x: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """`x[mask] = values` in place, the values in the order of the mask."""
    made = x.clone()
    made[batch["mask"]] = batch["values"] * x.sum()
    return made


FUNCTIONS: dict[str, Function] = {
    "cov": lambda x, batch: torch.cov(x),
    "cov of a vector": lambda x, batch: x[0].cov(correction=0),
    "weighted cov": lambda x, batch: x.t().cov(
        correction=2, fweights=batch["weights"], aweights=batch["parts"]
    ),
    "cov by frequencies": lambda x, batch: torch.cov(x.t(), fweights=batch["weights"]),
    "corrcoef": lambda x, batch: torch.corrcoef(x),
    "combinations": lambda x, batch: torch.combinations(x[:, 0], 3),
    "combinations of one": lambda x, batch: torch.combinations(x[0], 2, with_replacement=True),
    "narrow": lambda x, batch: x.narrow(1, batch["start"], 2) * x.narrow(0, batch["start"] - 4, 2)[:1, 2:],
    "values at a mask": put,
    "a row at a mask": lambda x, batch: x.index_put((batch["mask"],), x[0] * 2),
    "added at a mask": lambda x, batch: torch.index_put(
        x, (batch["mask"],), x[:1] * batch["values"], accumulate=True
    ),
    "numbers at a mask of elements": lambda x, batch: x.index_put(
        (batch["mask"][:, None] & (x > 9),), x.new_zeros(0)
    ),
    "a row for each element at a mask": lambda x, batch: x.index_put(
        (batch["mask"],), x.new_ones(1, 1) * 3
    ),
    "the size of another": lambda x, batch: x * x.detach().clone().resize_as_(x[:, :4]),
    "repeats of a known number": lambda x, batch: x.repeat_interleave(
        batch["weights"], 0, output_size=8
    ),
    "least squares": lambda x, batch: torch.linalg.lstsq(x, x[:, :2] ** 2 + 1).solution,
    "their residuals": lambda x, batch: torch.linalg.lstsq(x, x[:, :2] ** 2, driver="gels").residuals,
    "several least squares": lambda x, batch: torch.linalg.lstsq(
        x.view(3, 2, 4), x.view(3, 2, 4).exp()
    ).solution,
}  # fmt: skip

if hasattr(F, "linear_cross_entropy"):
    FUNCTIONS["cross-entropy in chunks"] = lambda x, batch: F.linear_cross_entropy(
        x,
        x[:3] * 2,
        batch["weights"] % 3,
        reduction="none",
        options=nn.LinearCrossEntropyOptions(batch_chunk_size=2),
    )


def a_batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(6, 5),
        "weights": WEIGHTS,
        "parts": PARTS,
        "mask": MASK,
        "values": torch.randn(3, 4),
        "start": torch.tensor(1),
    }


def loss_of(function: Function) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made = function(model(batch["x"]), batch)
        return (made * torch.arange(1.0, 1.0 + made.numel()).view(made.shape)).square().sum()

    return loss


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("sbp", [weft.split(0), weft.broadcast], ids=str)
def test_the_same_training(name: str, sbp: Any) -> None:
    batch, loss = a_batch(), loss_of(FUNCTIONS[name])
    model = nn.Linear(5, 4)
    expected = plain_training(model, loss, [batch] * 2)
    strategy = weft.Strategy(batch={"x": sbp})
    with compiled(model, loss, batch, [0, 1], strategy) as program:
        assert_same_training(program, [batch] * 2, expected)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "too few places": ("values at a mask", {"mask": MASK.roll(1) & MASK}, "must be true at 3 places"),
    "too many places": ("values at a mask", {"mask": torch.ones(6, dtype=torch.bool)}, "3 places"),
    "beyond the end": ("narrow", {"start": torch.tensor(3)}, "exceed dimension"),
    "weights below zero": ("weighted cov", {"weights": -WEIGHTS}, "cannot be negative"),
    "no weight": ("cov by frequencies", {"weights": WEIGHTS * 0}, "sum to zero"),
    "other repeats": ("repeats of a known number", {"weights": WEIGHTS + 1}, "output_size=8"),
    "fewer repeats": ("repeats of a known number", {"weights": WEIGHTS - 1}, "output_size=8"),
    "repeats below zero": (
        "repeats of a known number", {"weights": torch.tensor([1, 2, -1, 2, 3, 1])}, "not be negative"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_torch_refuses_by_its_values_fails(case: str) -> None:
    name, changed, text = WRONG[case]
    batch, loss, model = a_batch(), loss_of(FUNCTIONS[name]), nn.Linear(5, 4)
    bad = {**batch, **changed}
    with pytest.raises((RuntimeError, IndexError)):
        loss(model, bad)
    strategy = weft.Strategy(batch={"x": weft.split(0)})
    with compiled(model, loss, batch, [0, 1], strategy) as program:
        with pytest.raises(RankFailure) as failure:
            program.step(bad)
        assert text in str(failure.value)
        assert "test_rewrites.py:" in str(failure.value)


def written_view(x: Tensor, start: Tensor) -> Tensor:
    x = x.clone()
    x.narrow(0, start, 2).zero_()
    return x


def written_base(x: Tensor, start: Tensor) -> Tensor:
    x = x.clone()
    part = x.narrow(0, start, 2)
    x.add_(1)
    return part


def split_at_values(x: Tensor, start: Tensor) -> Tensor:
    return torch.tensor_split(x, start)[0]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (written_view, "written later"),
        (written_base, "written later"),
        (split_at_values, "expected numbers"),
    ],
)
def test_what_is_refused(function: Callable[[Tensor, Tensor], Tensor], text: str) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": function(batch["x"], batch["start"])}

    with pytest.raises(CaptureError, match=text) as refusal:
        capture(nn.Linear(1, 1), loss, None, a_batch(), training=False)
    assert "test_rewrites.py:" in str(refusal.value)


def test_values_that_do_not_fit_make_nothing_larger() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": batch["x"][:, :1].index_put((batch["mask"],), batch["x"][0])}

    batch, model = a_batch(), nn.Linear(1, 1)
    with weft.local_world(2):
        placement = weft.placement("cpu", [0, 1])
        program = weft.compile(model, loss, None, batch, placement=placement)
        with pytest.raises(RankFailure, match="shape mismatch"):
            program.step(batch)


def test_a_view_may_be_read_where_others_write() -> None:
    """A write before the view, and one to another tensor."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"].clone()
        x.add_(1)
        part = x.narrow(0, batch["start"], 2)
        part.clone().zero_()
        return {"x": part + 1}

    batch = a_batch()
    with weft.local_world(2):
        placement = weft.placement("cpu", [0, 1])
        program = weft.compile(nn.Linear(1, 1), loss, None, batch, placement=placement)
        found = program.step(batch)["x"]
        program.close()
    torch.testing.assert_close(found, loss(nn.Linear(1, 1), batch)["x"])
