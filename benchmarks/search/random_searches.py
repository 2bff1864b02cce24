"""Random searches whose best strategy is compiled and run on threads: none may be refused, or hold more than told.

    OMP_NUM_THREADS=1 python -m benchmarks.search.random_searches --searches 1000 --seed 0

Each draws a small step, a machine of the catalogue with two or four of its devices, parts that are fixed, a limit of
memory, a number of moves and a seed. Losses of three steps are compared with plain PyTorch, the simulated memory with
the limit, and the memory that tensors took with what the plan said: threads may run acts in another order than the
plan's clock, which moves the peak by a few tensors, here some hundred bytes each.
"""

from __future__ import annotations

import argparse
import copy
import traceback
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any, final

import torch
from torch import Tensor, nn

import weft
from benchmarks.search.small import UnrolledTwice, loss
from weft.errors import UserError
from weft.hardware import usual_device
from weft.planning.machine import Machine, machine_of
from weft.strategy.strategy import Strategy

TOPOLOGIES = ("h100", "v100", "flexflow-k80", "flexflow-p100")
STEPS = 3
# By so much may the peak of memory be off: a part of it, and bytes of single small tensors.
PART, SMALL = 0.03, 1024
# So many searches after which all so far are counted.
EACH = 50


@final
class ResidualBlock(nn.Module):
    """Two layers and a norm, added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of x."""
        found: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


@final
class Stacked(nn.Module):
    """Blocks, and a head for classes."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Scores [samples, 8], of [samples, width]."""
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


@final
class Images(nn.Module):
    """A convolution, a pool and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Scores [samples, 8], of [samples, 2, 8, 8]."""
        found: Tensor = self.head(nn.functional.max_pool2d(torch.relu(self.conv(x)), 2).flatten(1))
        return found


@final
@dataclass(frozen=True)
class Case:
    """A search, and what it is for.

    Attributes:
        model: on the CPU.
        batch: of its steps.
        machine: that is searched for.
        options: of `weft.search`.
    """

    model: nn.Module
    batch: dict[str, Tensor]
    machine: Machine
    options: dict[str, Any]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A new one."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def case_of(seed: int) -> Case:
    """The search of a seed."""
    random = Random(seed)
    torch.manual_seed(seed)
    samples = random.choice((4, 8, 16))
    kind = random.choice(("stack", "stack", "images", "words"))
    x = torch.randn(samples, 16)
    model: nn.Module = Stacked(random.choice((1, 2, 4)), 16)
    if kind == "images":
        model, x = Images(), torch.randn(samples, 2, 8, 8)
    if kind == "words":
        model, x = UnrolledTwice(8, 16), torch.randint(8, (samples, 2))
    devices = random.choice((2, 4))
    name = random.choice((*TOPOLOGIES, "usual"))
    usual = name == "usual"
    costs = usual_device("cpu") if usual else machine_of(f"{name}x{devices}").costs
    options = {
        "fixed": _fixed(random),
        "seed": seed,
        "moves": random.choice((1, 5, 20, 60)),
        "every_rank": random.random() < 0.7,
    }
    batch = {"x": x, "y": torch.randint(8, (samples,))}
    return Case(model, batch, Machine(costs, costs, devices, "cpu"), options)


def _fixed(random: Random) -> Strategy:
    """Some of the entries, most often none."""
    drawn: dict[str, Any] = {}
    if random.random() < 0.2:
        drawn["zero"] = weft.Zero(random.choice((1, 2, 3)))
    if random.random() < 0.2:
        drawn["micro_batches"] = 2
    if random.random() < 0.2:
        drawn["stages"] = 2
    if random.random() < 0.2:
        drawn["clip_norm"] = 1e6
    if random.random() < 0.2:
        drawn["parameters"] = {"head.weight": random.choice((weft.broadcast, weft.split(0)))}
    if random.random() < 0.1:
        drawn["recompute"] = ("*",)
    return Strategy(**drawn)


def limited(case: Case, random: Random) -> dict[str, Any]:
    """The options, in some searches with a limit between the least memory that is known and that of the quickest."""
    if random.random() < 0.5:
        return case.options
    found = weft.search(_job(case, case.model), case.machine, **case.options)
    held = [each.memory for each in found.tried if each.memory is not None]
    return {**case.options, "memory_limit": random.randint(min(held), max(held))}


def _job(case: Case, model: nn.Module) -> weft.Job:
    return weft.Job(model, loss, case.optimizer(model), case.batch)


def outcome(case: Case, random: Random) -> str:
    """The outcome: "ran", "none fits" where the search finds nothing, or what is wrong, in words."""
    try:
        options = limited(case, random)
        found = weft.search(_job(case, case.model), case.machine, **options)
    except UserError as error:
        return f"none found: {str(error)[:60]}"
    limit, told = options.get("memory_limit"), found.simulation.memory
    if limit is not None and (told is None or told.total > limit):
        return "above the limit"
    return ran(case, found.best)


def ran(case: Case, strategy: Strategy) -> str:
    """Says "ran" where a strategy trains as plain PyTorch does and holds what its plan says; else what is wrong."""
    expected = plain_losses(case)
    stages = strategy.stages
    named = not isinstance(stages, int) and bool(stages)
    ranks = (
        sorted({rank for stage in stages for rank in stage.placement.ranks})  # type: ignore[union-attr]
        if named
        else torch.arange(torch.tensor(strategy.grid).prod().item())
        .reshape(*strategy.grid)
        .tolist()
    )
    model = copy.deepcopy(case.model)
    with weft.local_world(torch.tensor(ranks).numel()):
        program = weft.compile(
            *(model, loss, case.optimizer(model), case.batch),
            placement=weft.placement("cpu", ranks),
            strategy=strategy,
        )
        losses = [program.step(case.batch).item() for _ in range(STEPS)]
        held = [(each.measured, each.predicted) for each in program.memory()]
        program.close()
    if any(abs(one - two) > 1e-4 * abs(two) for one, two in zip(losses, expected, strict=True)):
        return f"losses {losses} in place of {expected}"
    if any(
        measured is not None and measured.peak > (1 + PART) * said.peak + SMALL
        for measured, said in held
    ):
        return "more memory than the plan says"
    return "ran"


def plain_losses(case: Case) -> list[float]:
    """Of plain PyTorch."""
    model = copy.deepcopy(case.model)
    optimizer, found = case.optimizer(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, case.batch)
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def main() -> None:
    """Print what came of them, and each that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    came = Counter[str]()
    for seed in range(chosen.seed, chosen.seed + chosen.searches):
        try:
            said = outcome(case_of(seed), Random(seed))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        kind = said if said == "ran" else said.partition(":")[0]
        came[kind] += 1
        if kind not in ("ran", "none found"):
            print(f"seed {seed}: {said[:300]}", flush=True)
        if came.total() % EACH == 0 or came.total() == chosen.searches:
            print(f"{came.total()} searches: {dict(came)}", flush=True)


if __name__ == "__main__":
    main()
