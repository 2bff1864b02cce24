"""Options of groups that change after a step was compiled: those by which an update keeps other states are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.capture.optimizer_groups import Optimizers
from weft.capture.optimizers.trials import KeptStates, states_kept
from weft.errors import UserError


def updates(**options: Any) -> tuple[torch.optim.Optimizer, KeptStates]:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups: list[Any] = [{"params": [each]} for each in parameters]
    optimizer = torch.optim.SGD(groups, lr=0.1, **options)
    return optimizer, KeptStates(Optimizers((optimizer,)))


@pytest.mark.parametrize("group", [0, 1])
def test_an_option_that_makes_another_state_is_named(group: int) -> None:
    optimizer, kept = updates()
    optimizer.param_groups[group]["momentum"] = 0.9
    with pytest.raises(UserError, match=f"parameter group {group} .*'momentum' was 0 .* is 0.9"):
        kept.check()


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"momentum": 0.9}, {"momentum": 0.5}),
        ({"momentum": 0.9}, {"momentum": 0.0}),  # the state stays, and is not used
        ({}, {"weight_decay": 0.1, "lr": 0.0}),
        ({}, {"maximize": True}),
        ({}, {"an option": "that was not there"}),
    ],
)
def test_options_that_keep_the_states_may_change(
    before: dict[str, Any], now: dict[str, Any]
) -> None:
    optimizer, kept = updates(**before)
    optimizer.param_groups[0].update(now)
    kept.check()


def test_the_states_that_options_keep() -> None:
    optimizer, _ = updates()
    assert states_kept(optimizer, 0, {}) == frozenset()
    assert states_kept(optimizer, 0, {"momentum": 0.5}) == {"momentum_buffer"}
    assert states_kept(optimizer, 1, {"momentum": 0.5, "nesterov": True}) == {"momentum_buffer"}
