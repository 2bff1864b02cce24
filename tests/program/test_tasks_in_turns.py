"""Gradients of batches that train different parameters: an update is of all of them, as in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from on_ranks import passed
from program.tasks_on_processes import (
    STRATEGIES,
    TwoHeads,
    adamw,
    check_rounds,
    one_for_each,
    task_batch,
    task_loss,
)
from weft.errors import UserError


@pytest.mark.parametrize("how", ["step", "update"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_update_of_all_tasks(name: str, how: str) -> None:
    make = adamw if how == "step" else one_for_each
    with weft.local_world(len(STRATEGIES[name][0])):
        check_rounds(name, how, make, ["ab", "b", "aba"])


@pytest.mark.slow
@pytest.mark.parametrize("names", [("clipped", "zero 3", "tensor", "stages")])
def test_an_update_of_all_tasks_in_processes(names: tuple[str, ...]) -> None:
    passed(Path(__file__).with_name("tasks_on_processes.py"), 2, *names)


@pytest.mark.parametrize("moved", ["to another group", "out of the optimizer"])
def test_a_gradient_of_another_group_is_refused(moved: str) -> None:
    """The step that has made it has planned its update by the group that it was in."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    groups: list[dict[str, Any]] = [
        {"params": [p]} for p in (*model.body.parameters(), *model.a.parameters())
    ]
    optimizer = torch.optim.SGD([*groups, {"params": list(model.b.parameters())}], lr=0.1)
    with weft.local_world(2):
        program = weft.compile(
            model,
            task_loss,
            optimizer,
            task_batch("a", 0),
            placement=weft.placement("cpu", [0, 1]),
        )
        program.step(task_batch("a", 0), update=False)
        *_, bias, others = optimizer.param_groups
        if moved == "to another group":
            others["params"].append(bias["params"].pop())
        else:
            bias["params"].clear()
        with pytest.raises(UserError, match=r"a\.bias has a gradient, but no step"):
            program.step(task_batch("b", 1))
        program.close()
