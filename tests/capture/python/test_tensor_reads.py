"""Values that Python reads of tensors: of those from outside they are watched, of those of the step refused."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weft.capture import Captured, capture
from weft.errors import CaptureError
from weft.ir.logical import Call

PAIR = torch.tensor([2.0, 4.0])
SAME = torch.tensor([2.0, 4.0])
RATE = torch.tensor(4.0)
COUNT = torch.tensor(2)
FLAG = torch.tensor(True)
LARGE = torch.ones(10, 10, dtype=torch.bfloat16)

WAYS: dict[str, Callable[[], Any]] = {
    "tolist": lambda: PAIR.tolist()[1],
    "many": lambda: LARGE.tolist()[9][9],
    "if": lambda: 2 if FLAG else 1,
    "not": lambda: 1 if not FLAG else 2,
    "is_nonzero": lambda: 2 if torch.is_nonzero(FLAG) else 1,
    "str": lambda: 2 if "4" in str(PAIR) else 1,
    "f-string": lambda: 2 if f"{RATE:.1f}" == "4.0" else 1,
    "percent": lambda: 2 if "%.1f" % RATE == "4.0" else 1,  # noqa: UP031
    "numpy": lambda: float(PAIR.numpy()[1]),
    "asarray": lambda: float(np.asarray(PAIR)[1]),
    "memoryview": lambda: memoryview(PAIR.numpy())[1],
    "from_dlpack": lambda: float(np.from_dlpack(PAIR)[1]),  # type: ignore[arg-type]
    "address": lambda: (ctypes.c_float * 2).from_address(PAIR.data_ptr())[1],
    "float": lambda: float(RATE),
    "int": lambda: int(RATE),
    "complex": lambda: complex(RATE).real,
    "item": lambda: RATE.item(),
    "math": lambda: math.sqrt(RATE),
    "index": lambda: [1, 2, 3][COUNT],  # type: ignore[call-overload]
    "range": lambda: sum(range(COUNT)) + 1,  # type: ignore[call-overload]
    "equal": lambda: 2 if torch.equal(PAIR, SAME) else 1,
    "allclose": lambda: 2 if torch.allclose(PAIR, SAME) else 1,
    "size": lambda: torch.ones(COUNT).sum(),  # type: ignore[call-overload]
    "number": lambda: torch.full((2,), RATE).sum(),  # type: ignore[call-overload]
    "select": lambda: torch.arange(4.0)[COUNT],
    "slice": lambda: torch.arange(1.0, 4.0)[:COUNT].sum(),
    "list": lambda: torch.tensor([RATE, RATE]).sum(),
    "list of flags": lambda: torch.tensor([FLAG, FLAG]).sum() + 1,
    "with a constant": lambda: (RATE * torch.tensor(1.0)).item(),
    "deepcopy": lambda: PAIR.__deepcopy__({}).sum(),
}


@pytest.fixture(autouse=True)
def as_they_were() -> Iterator[None]:
    yield
    write(4.0, 2)


def write(rate: float, count: int) -> None:
    PAIR.numpy()[1] = rate  # which no version counts
    LARGE[9, 9] = rate
    RATE.fill_(rate)
    COUNT.fill_(count)
    FLAG.fill_(count == 2)


def squares(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def captured(loss_fn: Callable[..., Any], model: nn.Module | None = None) -> Captured:
    model = model or nn.Linear(4, 4)
    return capture(model, loss_fn, torch.optim.SGD(model.parameters()), torch.ones(2, 4))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_values_of_a_tensor_from_outside_are_watched(way: Callable[[], Any]) -> None:
    write(4.0, 2)
    watch = captured(lambda model, batch: squares(model, batch) * way()).watch
    assert watch.changed() is None
    write(3.0, 1)
    changed = watch.changed()
    assert changed is not None
    assert changed.text.startswith("the values of the global ")
    write(4.0, 2)
    assert watch.changed() is None


def test_values_that_the_graph_reads_are_not_watched_nor_those_of_numbers() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        assert FLAG, "no flag"
        return squares(model, batch) * PAIR[1] * int(torch.tensor(9.0).sqrt()) * torch.tensor(2.0)

    found = captured(loss)
    write(3.0, 1)
    assert found.watch.changed() is None
    assert any(call.op == "weft.required" for call in found.graph.of_kind(Call))


def test_memory_of_an_array() -> None:
    rate = np.array(4.0)
    found = captured(lambda model, batch: squares(model, batch) * torch.from_numpy(rate).item())
    rate[...] = 3.0
    assert found.watch.changed() is not None


class Slowed(torch.autograd.Function):
    """Its backward reads a tensor, by a way that no mode of torch sees there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        ctx.by = by
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.by.tolist()[1], None


def slowed(by: torch.Tensor) -> Callable[..., Any]:
    return lambda model, batch: Slowed.apply(squares(model, batch), by)  # type: ignore[no-untyped-call]


def test_values_that_a_backward_reads() -> None:
    found = captured(slowed(PAIR))
    write(3.0, 1)
    assert found.watch.changed() is not None


def test_values_that_a_backward_reads_of_a_parameter_are_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=r"ctx\.by\.tolist[\s\S]*the values in a tensor"):
        captured(slowed(model.bias), model)


# Of tensors of the step, and of copies that are made of ones from outside: the call, and what the error names.
# The op where the error was caught, else all that is known of what was handed on.
NUMBER = r"(_local_scalar_dense|a number of \.item\(\) or \.tolist\(\))"
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "numpy": (lambda x: float(x.detach().numpy()[0, 0]), r"Tensor\.numpy"),
    "asarray": (lambda x: float(np.asarray(x)[0, 0]), r"Tensor\.__array__"),
    "view": (lambda x: float(PAIR.detach().cpu().numpy()[0]), r"Tensor\.numpy"),
    "pickle": (lambda x: PAIR.__reduce_ex__(2), r"Tensor\.__reduce_ex__"),
    "storage": (lambda x: PAIR.untyped_storage().tolist()[0], r"Tensor\.untyped_storage"),
    "made": (lambda x: x.sum(dim=torch.arange(2).tolist()), NUMBER),
    "made size": (lambda x: torch.ones(torch.arange(2).tolist()).sum(), NUMBER),
}


@pytest.mark.parametrize(("way", "name"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("caught", [False, True])
def test_values_of_the_step_are_refused_alike(
    way: Callable[[Any], Any], name: str, caught: bool
) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        try:
            scale = way(batch)
        except Exception:
            if not caught:
                raise
            scale = 1.0
        return squares(model, batch) * scale

    with pytest.raises(CaptureError, match=rf"the values in a tensor \(\S*{name}\S*\)"):
        captured(loss)
