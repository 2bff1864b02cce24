"""Steps of two tasks, each with a head of its own, by weft and in plain PyTorch; one rank of them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from single_device import assert_same_state

S, B = weft.split, weft.broadcast


class TwoHeads(nn.Module):
    """A body, and a head for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        found: torch.Tensor = getattr(self, task)(self.body(x))
        return found


def task_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["x"], batch["task"]) - batch["t"]).square().mean()


def task_batch(task: str, seed: int) -> dict[str, Any]:
    make = torch.Generator().manual_seed(seed)
    x, t = (torch.randn(4, n, generator=make, dtype=torch.float64) for n in (4, 3))
    return {"x": x, "t": t, "task": task}


def adamw(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-4)]


def one_for_each(model: Any) -> list[torch.optim.Optimizer]:
    """A group of its own for the head of a, and another optimizer for that of b."""
    groups = [{"params": model.body.parameters()}, {"params": model.a.parameters(), "lr": 0.3}]
    return [
        torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        torch.optim.AdamW(model.b.parameters(), lr=0.1, eps=1e-4),
    ]


STRATEGIES: dict[str, tuple[Any, weft.Strategy]] = {
    "data": ([0, 1], weft.data_parallel()),
    "clipped": ([0, 1], weft.Strategy(batch={"*": S(0)}, clip_norm=0.05)),
    "zero 1": ([0, 1], weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(1))),
    "zero 2 clipped": (
        [0, 1, 2],
        weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(2), clip_norm=0.05),
    ),
    "zero 3": ([0, 1], weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(3), micro_batches=2)),
    "tensor": (
        [0, 1],
        weft.Strategy(parameters={"body.0.*": S(0), "*.weight": S(1), "*": B}, clip_norm=0.05),
    ),
    "stages": (
        [0, 1],
        weft.Strategy(
            batch={"*": B},
            stages=[
                weft.Stage(["body"], placement=weft.placement("cpu", [0])),
                weft.Stage(["a", "b"], placement=weft.placement("cpu", [1])),
            ],
            micro_batches=2,
            clip_norm=0.05,
        ),
    ),
}


def check_rounds(
    name: str, how: str, make: Any = adamw, rounds: Sequence[str] = ("ab", "ba")
) -> None:
    """Rounds of tasks, each with one update of all that they train; every process may call it.

    Args:
        name: of the strategy.
        how: the updates are made by the last step of a round, "step", or by `program.update`.
        make: the optimizers of a model.
        rounds: the tasks of each round.
    """
    grid, strategy = STRATEGIES[name]
    torch.manual_seed(0)
    model = TwoHeads().double()
    plain = copy.deepcopy(model)
    optimizers, expected = make(model), make(plain)
    example = task_batch("a", 0)
    program = weft.compile(
        model,
        task_loss,
        optimizers,
        example,
        placement=weft.placement("cpu", grid),
        strategy=strategy,
    )
    for number, tasks in enumerate(rounds):
        batches = [task_batch(task, 10 * number + i) for i, task in enumerate(tasks)]
        for i, batch in enumerate(batches):
            task_loss(plain, batch).backward()
            program.step(batch, update=how == "step" and i == len(tasks) - 1)
        if how == "update":
            program.update()
        if strategy.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), strategy.clip_norm)
        for one in expected:
            one.step()
            one.zero_grad()
        assert_same_state(program.full_state_dict(), plain.state_dict(), 1e-9)
    for one, other in zip(optimizers, expected, strict=True):
        assert_same_states(program.full_optimizer_state_dict(one), other.state_dict())
    program.close()


def assert_same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for key, states in expected["state"].items():
        for name, value in states.items():
            torch.testing.assert_close(
                found["state"][key][name], value, rtol=1e-9, atol=1e-12, msg=f"{key} {name}"
            )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check_rounds(name, "step")
        check_rounds(name, "update", one_for_each)
