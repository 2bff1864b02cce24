"""Optimizers whose update of a matrix needs all of it, and steps by them beside plain PyTorch; one rank of them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from program.tasks_on_processes import assert_same_states
from single_device import assert_same_state

S, B = weft.split, weft.broadcast


class ByNorms(torch.optim.Optimizer):
    """LAMB, and without moments LARS: a step as long as the norm of the whole parameter says."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, moments: bool = True) -> None:
        super().__init__(params, {"lr": lr, "moments": moments})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                step = p.grad
                if group["moments"]:
                    state = self.state[p]
                    if not state:
                        state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["first"].lerp_(p.grad, 0.1)
                    state["second"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                    step = state["first"] / (state["second"].sqrt() + 1e-3)
                ratio = p.norm() / (step.norm() + 1e-6)
                p.sub_(group["lr"] * ratio * step)


def matrices(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def muon(model: Any) -> Any:
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        torch.optim.Muon(matrices(model), lr=0.1),
        torch.optim.AdamW(vectors, lr=0.1, eps=1e-4),
    ]


MAKERS = {
    "Muon": muon,
    "Adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.1)],
    "LAMB": lambda model: [ByNorms(model.parameters())],
    "LARS": lambda model: [ByNorms(model.parameters(), moments=False)],
}
# Columns, then rows; the first bias with the columns.
TENSOR = {"0.*": S(0), "2.weight": S(1), "*": B}
OVER_ONE = {key: (B, sbp) for key, sbp in TENSOR.items()}


def _stages(placements: list[Any]) -> list[weft.Stage]:
    first, last = (weft.placement("cpu", ranks) for ranks in placements)
    return [weft.Stage(["0", "1"], placement=first), weft.Stage(["2"], placement=last)]


STRATEGIES: dict[str, tuple[Any, weft.Strategy]] = {
    "tensor": ([0, 1], weft.Strategy(parameters=TENSOR)),
    "uneven": ([0, 1, 2, 3], weft.Strategy(parameters=TENSOR, clip_norm=0.1)),
    "micro": ([0, 1], weft.Strategy(parameters=TENSOR, micro_batches=2)),
    "data": (
        [[0, 1], [2, 3]],
        weft.Strategy(batch={"*": (S(0), B)}, parameters=OVER_ONE, micro_batches=2),
    ),
    "zero 1": (
        [[0, 1], [2, 3]],
        weft.Strategy(batch={"*": (S(0), B)}, parameters=OVER_ONE, zero=weft.Zero(1)),
    ),
    "zero 3": (
        [[0, 1], [2, 3]],
        weft.Strategy(
            batch={"*": (S(0), B)}, parameters=OVER_ONE, zero=weft.Zero(3), micro_batches=2
        ),
    ),
    "stages": (
        [0, 1, 2, 3],
        weft.Strategy(
            parameters=TENSOR, stages=_stages([[0, 1], [2, 3]]), micro_batches=2, clip_norm=0.1
        ),
    ),
}


def net() -> nn.Module:
    """With seven columns, which four ranks do not divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)).double()


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = (model(batch["x"]) - batch["t"]).square().mean()
    return found


def rows(seed: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(8, size, generator=make, dtype=torch.float64)
        for name, size in (("x", 5), ("t", 6))
    }


def check_matrices(name: str, rule: str, steps: int = 3) -> None:
    """Steps by an optimizer of matrices in a strategy are those of plain PyTorch; every process may call it."""
    grid, strategy = STRATEGIES[name]
    model = net()
    plain = copy.deepcopy(model)
    optimizers, expected = MAKERS[rule](model), MAKERS[rule](plain)
    program = weft.compile(
        model,
        squares,
        optimizers,
        rows(0),
        placement=weft.placement("cpu", grid),
        strategy=strategy,
    )
    for number in range(steps):
        batch = rows(number)
        squares(plain, batch).backward()
        if strategy.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), strategy.clip_norm)
        for one in expected:
            one.step()
            one.zero_grad()
        program.step(batch)
        assert_same_state(program.full_state_dict(), plain.state_dict(), 1e-9)
    for one, other in zip(optimizers, expected, strict=True):
        assert_same_states(program.full_optimizer_state_dict(one), other.state_dict())
    program.close()


if __name__ == "__main__":
    for strategy in sys.argv[1:]:
        check_matrices(strategy, "Muon")
        check_matrices(strategy, "LAMB")
