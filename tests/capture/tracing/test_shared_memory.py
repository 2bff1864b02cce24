"""Different tensors in one memory: refused where the step writes to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.capture import capture
from weft.errors import CaptureError


class Two(nn.Module):
    """A layer, and two tensors more.

    Args:
        make: the two tensors, of the layer; a parameter, a buffer, or a tensor that stands in a list.
        writes: whether each call writes to the first of them.
    """

    def __init__(self, make: Callable[[nn.Linear], list[Any]], writes: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.writes = writes
        self.rest: list[torch.Tensor] = []
        for name, tensor in zip(("one", "other"), make(self.layer), strict=False):
            if isinstance(tensor, nn.Parameter | nn.Buffer):
                setattr(self, name, tensor)
            else:
                self.rest.append(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.one.add_(x.detach().mean())
        held = (*self.rest, *(getattr(self, name, x) for name in ("one", "other")))
        found: torch.Tensor = self.layer(x) + sum(each.sum() for each in held)
        return found


def captured(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(model, lambda m, b: m(b).square().mean(), optimizer, torch.ones(2, 4))


def of_ten(*places: Any) -> list[Any]:
    memory = torch.zeros(10)
    return [nn.Buffer(memory[place]) for place in places]


@pytest.mark.parametrize(
    ("make", "writes", "names"),
    [
        (lambda layer: [nn.Parameter(layer.weight.data.t())], False, ["one", "layer.weight"]),
        (lambda layer: [nn.Buffer(layer.weight.data[1:])], False, ["one", "layer.weight"]),
        (lambda layer: [layer.bias.detach()], False, ["layer.bias", "a tensor from outside"]),
        (lambda layer: of_ten(slice(0, 6), slice(5, 10)), True, ["one", "other"]),
        (lambda layer: of_ten(slice(0, None, 2), slice(4, 6)), True, ["one", "other"]),
    ],
)
def test_memory_that_is_written_and_is_two_tensors_is_refused(
    make: Callable[[nn.Linear], list[Any]], writes: bool, names: list[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(Two(make, writes))
    assert all(word in str(caught.value) for word in [*names, "are in the same memory", "clone()"])


@pytest.mark.parametrize(
    ("make", "writes"),
    [
        (lambda layer: of_ten(slice(0, 5), slice(5, 10)), True),
        (lambda layer: of_ten(slice(0, None, 2), slice(1, None, 2)), True),
        (lambda layer: of_ten(slice(0, 6), slice(5, 10)), False),
        (lambda layer: [nn.Buffer(torch.zeros(0)), nn.Buffer(torch.zeros(0))], True),
        (lambda layer: [layer.weight], False),
    ],
)
def test_memory_of_their_own_is_not(make: Callable[[nn.Linear], list[Any]], writes: bool) -> None:
    assert captured(Two(make, writes)).graph


def test_parts_of_one_flat_memory_are_parameters_of_their_own() -> None:
    model, flat = nn.Linear(4, 4), torch.randn(20)
    model.weight, model.bias = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:])
    assert captured(model).graph


def test_a_sparse_buffer_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("edges", torch.eye(4).to_sparse())
    with pytest.raises(CaptureError, match=r"the buffer edges is not a dense tensor.*to_dense"):
        captured(model)
