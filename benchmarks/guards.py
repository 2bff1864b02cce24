"""Microseconds that a step takes to see that nothing changed around it: guards, places of tensors, gradients.

    OMP_NUM_THREADS=1 python -m benchmarks.guards

A model of 50 linear layers, which are 100 parameters, trained with AdamW by one rank and by two in one
process. Each check runs alone, many times in a round; of each the least and the median of the rounds
are given, as what disturbs the machine only adds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import weft
from benchmarks.measure import machine, save

WIDTH, LAYERS = 4, 50
TIMES = 20  # calls in a round: few, so that some rounds are not interrupted


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def microseconds(check: Callable[[], object]) -> float:
    """Of one call, the mean of a round."""
    start = time.perf_counter()
    for _ in range(TIMES):
        check()
    return (time.perf_counter() - start) / TIMES * 1e6


def measured(ranks: int, rounds: int) -> dict[str, dict[str, float]]:
    """For each check its least and its median microseconds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, WIDTH)
    placement = weft.placement("cpu", list(range(ranks)))
    with weft.local_world(ranks):
        program = weft.compile(model, squares, optimizer, batch, placement=placement)
        program.step(batch)
        training = program._core.training
        checks: dict[str, Callable[[], object]] = {
            "guards": program._core.variants.current.guards.changed,
            "places": program._core.places.check,
            "gradients": training.gradients.standing,
        }
        spent: dict[str, list[float]] = {name: [] for name in checks}
        for _ in range(rounds):
            for name, check in checks.items():
                spent[name].append(microseconds(check))
        program.close()
    least = {name: min(each) for name, each in spent.items()}
    median = {name: statistics.median(each) for name, each in spent.items()}
    return {
        name: {"least": round(least[name], 1), "median": round(median[name], 1)} for name in checks
    } | {"all": {"least": round(sum(least.values()), 1), "median": round(sum(median.values()), 1)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=300)
    o = parser.parse_args()
    result = {f"{ranks} ranks": measured(ranks, o.rounds) for ranks in (1, 2)}
    for ranks, checks in result.items():
        print(ranks, ", ".join(f"{name} {spent['least']} µs" for name, spent in checks.items()))
    save("guards", {"machine": machine(), **result})


if __name__ == "__main__":
    main()
