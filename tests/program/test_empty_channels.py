"""Channels split along two axes, of which some ranks then have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from single_device import assert_same_training, compiled, plain_training
from tools.oracles.rules import describe, run_call, torch_call
from weft.ops import localize, signatures

pytestmark = pytest.mark.usefixtures("double_precision")

GRID = [[0, 1], [2, 3]]
S, B = weft.split, weft.broadcast


class Images(nn.Module):
    """Convolutions of 3 channels, to and fro."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, padding=1, bias=bias)
        self.up = nn.ConvTranspose2d(4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.up(self.down(x))
        return made


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def check(model: nn.Module, batch: Tensor, layouts: dict[str, Any]) -> None:
    strategy = weft.Strategy(batch={"*": B}, parameters=layouts)
    expected = plain_training(model, loss, [batch] * 3)
    with compiled(model, loss, batch, GRID, strategy) as program:
        assert_same_training(program, [batch] * 3, expected)


@pytest.mark.parametrize("shape", [(2, 3, 25), (3, 25), (2, 3, 5)])
def test_sequences(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check(nn.Conv1d(3, 3, 3), torch.randn(shape), {"weight": (S(1), S(1))})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "layouts",
    [
        {"down.weight": (S(1), S(1))},
        {"down.weight": (S(1), S(1)), "down.bias": (B, S(0))},
        {"down.weight": (S(0), S(1))},
        {"up.weight": (S(1), S(1))},
        {"up.weight": (S(1), S(0))},
    ],
    ids=str,
)
def test_images(layouts: dict[str, Any], bias: bool) -> None:
    torch.manual_seed(0)
    if not bias:
        layouts = {name: sbp for name, sbp in layouts.items() if name != "down.bias"}
    check(Images(bias), torch.randn(2, 3, 5, 5), layouts)


def test_a_rank_without_channels_has_the_whole_gradient_of_the_bias() -> None:
    grad, x, weight = torch.randn(2, 4, 5), torch.randn(2, 3, 7), torch.randn(4, 3, 3)
    rest = ([4], [1], [0], [1], False, [0], 1, [True, True, True])
    whole, _, expected = describe(
        torch_call("aten.convolution_backward.default", grad, x, weight, *rest)
    )
    split = next(one for one in signatures(whole, 2) if one.results == (S(1), S(1), B))
    local = localize(localize(whole, split, 2, 1), split, 2, 1)
    found = run_call(local, (grad, x[:, 3:], weight[:, 3:]))
    torch.testing.assert_close(found[2], expected[2])
