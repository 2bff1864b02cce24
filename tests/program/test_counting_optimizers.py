"""Optimizers of the user's own that count their steps in themselves or in their groups, beside plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from single_device import assert_same_state, whole_state
from weft.errors import CaptureError, UserError


class Lookahead(torch.optim.SGD):
    """Every second step goes to an average of slow parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.calls += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.clone())
            if self.calls % 2 == 0:
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al., 2024): numbers in each group say how it goes on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "beta": 0.9, "warm": 3, "k": 0, "sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"] * min((group["k"] + 1) / group["warm"], 1.0)
            group["most"] = max(rate, group.get("most", 0.0))
            group["sum"] += group["most"] ** 2
            part = group["most"] ** 2 / group["sum"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, part).add_(p.grad, alpha=rate * (group["beta"] * (1 - part) - 1))
                z.sub_(p.grad, alpha=rate)
            group["k"] += 1


def in_groups(model: Any) -> ScheduleFree:
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "warm": 2}]
    return ScheduleFree(groups)


def squares(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def numbers(optimizer: Any) -> list[Any]:
    groups = [{k: x for k, x in g.items() if k != "params"} for g in optimizer.param_groups]
    return [groups, getattr(optimizer, "calls", None)]


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (lambda model: Lookahead(model.parameters()), weft.Strategy(stages=2, micro_batches=2)),
        (in_groups, weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3))),
        (in_groups, weft.Strategy(stages=2, micro_batches=2)),
    ],
)
def test_they_count_as_on_one_device(make: Callable[[Any], Any], strategy: weft.Strategy) -> None:
    model = layers()
    plain = copy.deepcopy(model)
    own, other = make(model), make(plain)
    batch = torch.randn(6, 4, dtype=torch.float64)

    def step(batch: torch.Tensor) -> None:
        other.zero_grad()
        squares(plain, batch).backward()
        other.step()

    with weft.local_world(2):
        place = weft.placement("cpu", [0, 1])
        program = weft.compile(model, squares, own, batch, placement=place, strategy=strategy)
        for rows in (6, 6, 4):  # another plan for the last
            program.step(batch[:rows])
            step(batch[:rows])
        program.verify(batch)
        program.step(batch, update=False)
        assert numbers(own) == numbers(other)
        program.update()
        step(batch)
        program.step(batch, update=False)
        own.step()
        step(batch)
        assert_same_state(whole_state(model), plain.state_dict())
        assert numbers(own) == numbers(other)
        program.close()


class ForEach(ScheduleFree):
    """Counts the parameters that it has updated, of which a rank has some."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                group["k"] += 1
                p.data.sub_(p.grad, alpha=1 / group["k"])


def test_what_is_no_count_of_steps_is_refused() -> None:
    model = layers()
    place, batch = weft.placement("cpu", [0]), torch.ones(2, 4, dtype=torch.float64)
    with weft.local_world(1), pytest.raises(CaptureError, match="changes 'k' of the parameter"):
        weft.compile(model, squares, ForEach(model.parameters()), batch, placement=place)


def test_counting_by_a_scaled_loss_is_refused() -> None:
    model = layers().float()
    place, strategy = weft.placement("cpu", [0]), weft.Strategy(precision="fp16")
    optimizer = Lookahead(model.parameters())
    with weft.local_world(1), pytest.raises(UserError, match=r"counts its steps \(self\.calls\)"):
        weft.compile(
            model, squares, optimizer, torch.ones(2, 4), placement=place, strategy=strategy
        )
