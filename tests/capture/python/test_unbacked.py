"""Numbers that a step reads from tensors: they may be returned, and nothing else."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.capture import capture
from weft.capture.batch import Number
from weft.capture.tree import Static
from weft.errors import CaptureError

OUTSIDE = torch.tensor(2.0)


def leaves(read: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    """How what is read of a batch [3, 4] stands in the result."""

    def step(model: nn.Module, batch: Tensor) -> Any:
        return {"read": read(batch)}

    found = capture(nn.Linear(4, 1), step, None, torch.ones(3, 4), training=False)
    return found.outputs.leaves


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "item of a list": lambda x: x[:1, :1].item(),
    "tolist": lambda x: x.sum().tolist(),
    "equal": lambda x: torch.equal(x, x * 1),
    "equal, a method": lambda x: x.equal(x * 1),
    "allclose": lambda x: torch.allclose(x, x * 1, atol=1.0),
    "allclose, a method": lambda x: x.allclose(x * 1),
    "as the class that it will have": lambda x: (
        x.sum().item() if isinstance(x.sum().item(), float) else None
    ),
    "made of numbers": lambda x: torch.tensor([1.0, 2.0]).sum().item(),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_number_is_returned(name: str) -> None:
    assert leaves(RETURNED[name]) == (Number("read"),)


def test_several_numbers_are_returned_at_any_depth() -> None:
    keys = [leaf.key for leaf in leaves(lambda x: [x.sum().item(), {"a": (x[0].tolist(),)}])]
    assert keys == ["read[0]", *(f"read[1].a[0][{i}]" for i in range(4))]


KNOWN: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "made of a number": (lambda x: torch.tensor(3.0).item(), 3.0),
    "computed of numbers": (lambda x: (torch.tensor(3.0) * 2).item(), 6.0),
    "of a shape": (lambda x: torch.tensor(x.shape[0]).item(), 3),
    "from outside": (lambda x: OUTSIDE.item(), 2.0),
    "equal, from outside": (lambda x: torch.equal(OUTSIDE, OUTSIDE), True),
    "other shapes": (lambda x: torch.equal(x, x[:2]), False),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_is_a_number_at_once(name: str) -> None:
    read, value = KNOWN[name]
    assert leaves(read) == (Static("read", value),)


USED: dict[str, Callable[[Tensor], Any]] = {
    "added to": lambda x: x.sum().item() + 1,
    "added": lambda x: 1 + x.sum().item(),
    "negated": lambda x: -x.sum().item(),
    "compared": lambda x: x.sum().item() > 0,
    "compared with itself": lambda x: x.sum().item() == x.sum().item(),
    "tested": lambda x: 1 if x.sum().item() else 2,
    "bool": lambda x: not torch.equal(x, x * 1),
    "float": lambda x: float(x.sum().item()),
    "int": lambda x: int(x.sum().item()),
    "rounded": lambda x: round(x.sum().item(), 2),
    "of math": lambda x: math.log(x.sum().item()),
    "index": lambda x: [1, 2][x.long().sum().item()],
    "range": lambda x: list(range(x.long().sum().item())),
    "key": lambda x: {x.sum().item(): 1},
    "text": lambda x: f"{x.sum().item():.2f}",
    "str": lambda x: str(x.sum().item()),
    "attribute": lambda x: x.sum().item().real,
    "method": lambda x: x.sum().item().is_integer(),
    "maximum": lambda x: max(x.sum().item(), 1.0),
    "times a tensor": lambda x: x * x.sum().item(),
    "argument of torch": lambda x: torch.add(x, x.sum().item()),
    "fills a tensor": lambda x: torch.full((2,), x.sum().item()),
    "made a tensor": lambda x: torch.tensor([x.sum().item()]),
    "of allclose": lambda x: torch.allclose(x, x * 1) + 1,
    "json": lambda x: json.dumps({"sum": [x.sum().item()]}),
    "lines of json": lambda x: json.dumps({"sum": [x.sum().item()]}, indent=2),
    "deep copy": lambda x: copy.deepcopy({"sum": x.sum().item()}),
    "mean": lambda x: statistics.mean([x.sum().item(), 1.0]),
    "dataclass": lambda x: repr(Held(x.sum().item())),
    "log": lambda x: logging.getLogger("steps").error("%s", x.sum().item()),
}


@dataclass
class Held:
    sum: float


@pytest.mark.parametrize("name", USED)
def test_any_other_use_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="values in a tensor") as refused:
        leaves(USED[name])
    lines = inspect.getsource(inspect.getmodule(leaves)).splitlines()  # type: ignore[arg-type]
    line = next(i for i, text in enumerate(lines, 1) if text.startswith(f'    "{name}": '))
    assert str(refused.value).startswith(f"{__file__}:{line}: ")


def test_the_loss_is_no_number() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrapped in (lambda x: x, lambda x: {"loss": x}, lambda x: (x, 1)):
        with pytest.raises(CaptureError, match="the loss is a number"):
            capture(
                model,
                lambda m, x, wrapped=wrapped: wrapped(m(x).sum().item()),
                optimizer,
                torch.ones(3, 4),
            )


class Keeping(nn.Linear):
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x).sum()
        self.last = made.item()
        return made


def test_a_number_that_is_kept_is_put_back() -> None:
    model = Keeping(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture(model, lambda m, x: m(x), optimizer, torch.ones(3, 4))
    assert model.last is None


class Slot:
    __slots__ = ("number",)
    number: Any


def test_a_number_that_leaves_the_step_is_refused() -> None:
    slot = Slot()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        slot.number = x.sum().item()
        return model(x)

    with pytest.raises(CaptureError, match=r"keeps a number in Slot\.number"):
        capture(nn.Linear(4, 1), step, None, torch.ones(3, 4), training=False)
    assert not hasattr(slot, "number")
