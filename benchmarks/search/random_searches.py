"""Random searches whose best strategy is compiled and run on threads: none may be refused, or hold more than told.

    OMP_NUM_THREADS=1 python -m benchmarks.search.random_searches --json docs/results/random_searches.json

Each draws a small step, a machine of the catalogue with two or four of its devices, parts that are fixed, a limit of
memory, a number of moves and a seed. Losses of three steps are compared with plain PyTorch, the simulated memory with
the limit, and the memory that tensors took on each rank with what the plan said: not a byte more may be held. The
outcome of each seed stands in the file given by `--json`; seeds that stand there are not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, final

import torch
from torch import Tensor, nn

import weft
from benchmarks.search.small import UnrolledTwice, loss
from weft.errors import UserError
from weft.hardware import default_device
from weft.planning.machine import Machine, machine_of
from weft.strategy.strategy import Strategy

TOPOLOGIES = ("h100", "v100", "flexflow-k80", "flexflow-p100")
STEPS = 3
# So many searches after which all so far are counted.
EACH = 50
# Outcomes that are none to worry about.
FINE = ("ran", "none found")


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
    costs = default_device("cpu") if usual else machine_of(f"{name}x{devices}").costs
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
    """The outcome: "ran", "none found" where the search finds nothing, or what is wrong, in words."""
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
        parts = [
            each.measured.peak / each.predicted.peak for each in program.memory() if each.measured
        ]
        program.close()
    if any(abs(one - two) > 1e-4 * abs(two) for one, two in zip(losses, expected, strict=True)):
        return f"losses {losses} in place of {expected}"
    if max(parts) > 1:
        return f"more memory than the plan says: {max(parts):.3f} of it"
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


def tried(seed: int) -> str:
    """The outcome of a seed's search; an error is one, too."""
    try:
        return outcome(case_of(seed), Random(seed))
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def kind_of(said: str) -> str:
    """An outcome without what stands only for one seed."""
    return said.partition(":")[0]


def write(path: Path, outcomes: Mapping[int, str]) -> None:
    """Write the outcomes of seeds, and how many there are of each kind, most first."""
    counts = dict(Counter(map(kind_of, outcomes.values())).most_common())
    said = {"searches": len(outcomes), "counts": counts, "outcomes": dict(sorted(outcomes.items()))}
    path.write_text(json.dumps(said, indent=1) + "\n")


def main() -> None:
    """Print what came of them, and each that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--json", type=Path, help="read, and written after each search")
    chosen = parser.parse_args()
    known: dict[int, str] = {}
    if chosen.json and chosen.json.exists():
        known = {int(k): x for k, x in json.loads(chosen.json.read_text())["outcomes"].items()}
    seeds = range(chosen.seed, chosen.seed + chosen.searches)
    for seed in (each for each in seeds if each not in known):
        said = known[seed] = tried(seed)
        if kind_of(said) not in FINE:
            print(f"seed {seed}: {said[:300]}", flush=True)
        if chosen.json:
            write(chosen.json, known)
        if len(known) % EACH == 0:
            print(
                f"{len(known)} searches: {dict(Counter(map(kind_of, known.values())))}", flush=True
            )
    print(f"{len(known)} searches: {dict(Counter(map(kind_of, known.values())))}", flush=True)


if __name__ == "__main__":
    main()
