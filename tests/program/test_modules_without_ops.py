"""Patterns may name a module that has no op in the step: one that is never read, or does nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import weft
from single_device import assert_same_training, compiled, plain_training
from weft.errors import StrategyError

pytestmark = pytest.mark.usefixtures("double_precision")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unread, self.nothing = nn.Linear(8, 8), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.unread(x)
        made: Tensor = self.nothing(self.second(self.first(x)))
        return made


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def stages(pattern: str) -> weft.Strategy:
    parts = (["first", pattern], [0]), (["second"], [1])
    placed = [weft.Stage(names, weft.placement("cpu", ranks)) for names, ranks in parts]
    return replace(weft.data_parallel(), stages=placed, micro_batches=2)


FIELDS = {
    "recompute": lambda pattern: replace(weft.data_parallel(), recompute=[pattern]),
    "offload": lambda pattern: replace(weft.data_parallel(), offload=[pattern]),
    "activations": lambda pattern: replace(
        weft.data_parallel(), activations={pattern: weft.split(0)}
    ),
    "stages": stages,
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("pattern", ["unread", "nothing"])
def test_a_pattern_may_name_it(field: str, pattern: str) -> None:
    torch.manual_seed(0)
    model, batch = Model(), torch.randn(8, 8)
    expected = plain_training(model, loss, [batch] * 2)
    with compiled(model, loss, batch, [0, 1], FIELDS[field](pattern)) as program:
        assert_same_training(program, [batch] * 2, expected)


@pytest.mark.parametrize("field", FIELDS)
def test_other_names_are_an_error_that_lists_it(field: str) -> None:
    with (
        pytest.raises(StrategyError, match="nothing"),
        compiled(Model(), loss, torch.randn(8, 8), [0, 1], FIELDS[field]("nothings")),
    ):
        pass
