"""What of a model and its optimizer decides the graph of a step: a step that was captured is not captured again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.errors import UserError
from weft.program.planning.step import Step


def step_of() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    return Step(model, lambda model, x: model(x).sum(), optimizer, torch.ones(2, 4))


Change = Callable[[Any, Any], object]
DECIDES: dict[str, tuple[Change, str]] = {
    "mode": (lambda m, o: m[1].eval(), "module 1 was 'train mode' and is 'eval mode'"),
    "trained": (
        lambda m, o: m[0].bias.requires_grad_(False),
        r"parameter 0.bias was 'float32\[4\].*, trained' and is 'float32\[4\].*, not trained'",
    ),
    "buffer": (
        lambda m, o: m[2].register_buffer("more", torch.ones(1)),
        "buffer 2.more was 'not there' and is",
    ),
    "flag": (
        lambda m, o: o.param_groups[0].update(nesterov=True),
        "option nesterov of parameter group 0 .* was 'False' and is 'True'",
    ),
    "number": (
        lambda m, o: o.param_groups[0].update(weight_decay=0.0),
        "option weight_decay of parameter group 0 .* was 'not 0' and is '0'",
    ),
    "members": (
        lambda m, o: o.param_groups[0]["params"].pop(),
        "parameter group 0 of .* was '0.weight, 0.bias, 2.weight, 2.bias' and is '0.weight, 0.bias, 2.weight'",
    ),
}
DECIDES_NOT: dict[str, Change] = {
    "rate": lambda m, o: o.param_groups[0].update(lr=0.2),
    "another number": lambda m, o: o.param_groups[0].update(weight_decay=0.3),
    "values": lambda m, o: m[0].weight.data.zero_(),
}


@pytest.mark.parametrize("name", DECIDES)
def test_what_decides_the_graph_may_not_change(name: str) -> None:
    change, words = DECIDES[name]
    step = step_of()
    step.captured()
    change(step.model, step.optimizer)
    with pytest.raises(UserError, match=words):
        step.captured()


@pytest.mark.parametrize("name", DECIDES_NOT)
def test_all_else_may_change(name: str) -> None:
    step = step_of()
    before = step.captured()
    DECIDES_NOT[name](step.model, step.optimizer)
    assert step.captured() is before


def test_modes_do_not_count_where_nothing_is_trained() -> None:
    """Evaluation sets all modules to eval mode itself."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    step = Step(model, lambda model, x: model(x).sum(), None, torch.ones(2, 4))
    before = step.captured()
    model[1].eval()
    assert step.captured() is before
