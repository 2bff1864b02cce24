"""Random searches whose best strategy is compiled and run on threads: none may be refused, or hold more than told.

    OMP_NUM_THREADS=1 python -m benchmarks.search.random_searches --json docs/results/random_searches.json

Each draws a small step, a machine of the catalogue with two or four of its devices, parts that are fixed, a limit of
memory, a number of moves and a seed. Losses of three steps are compared with plain PyTorch, the simulated memory with
the limit, and the memory that tensors took on each rank with what the plan said: not a byte more may be held. The
outcome of each seed stands in the file given by `--json`; seeds that stand there are not run again.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, final

import torch
from torch import Tensor, nn

import weft
from benchmarks.search.small import UnrolledTwice
from benchmarks.works.work import Batch, class_loss
from tools.model_cases import Training, loss_distance
from weft.errors import UserError
from weft.hardware import default_device
from weft.planning.machine import Machine, machine_of
from weft.strategy.strategy import Strategy

TOPOLOGIES = ("h100", "v100", "flexflow-k80", "flexflow-p100")
STEPS, WIDTH, CLASSES = 3, 16, 8
# So many searches after which all so far are counted.
EACH = 50
# Outcomes that are none to worry about.
FINE = ("ran", "none found")


@final
class ResidualBlock(nn.Module):
    """Two layers and a norm, added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


def stacked(blocks: int) -> nn.Module:
    """Blocks, and a head for classes."""
    body = nn.Sequential(*(ResidualBlock() for _ in range(blocks)))
    return nn.Sequential(OrderedDict(blocks=body, head=nn.Linear(WIDTH, CLASSES)))


def images() -> nn.Module:
    """A convolution, a pool and a layer."""
    conv, head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(64, CLASSES)
    rest = {"act": nn.ReLU(), "pool": nn.MaxPool2d(2), "flat": nn.Flatten(), "head": head}
    return nn.Sequential(OrderedDict(conv=conv, **rest))


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
    batch: Batch
    machine: Machine
    options: dict[str, Any]

    def search(self, **options: Any) -> weft.SearchResult:
        """What a search finds.

        Raises:
            UserError: nothing fits.
        """
        job = weft.Job(self.model, class_loss, adamw(self.model), self.batch)
        return weft.search(job, self.machine, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def case_of(seed: int) -> Case:
    """The search of a seed."""
    random = Random(seed)
    torch.manual_seed(seed)
    samples = random.choice((4, 8, 16))
    kind = random.choice(("stack", "stack", "images", "words"))
    x = torch.randn(samples, WIDTH)
    model = stacked(random.choice((1, 2, 4)))
    if kind == "images":
        model, x = images(), torch.randn(samples, 2, 8, 8)
    if kind == "words":
        model, x = UnrolledTwice(CLASSES, WIDTH), torch.randint(CLASSES, (samples, 2))
    devices = random.choice((2, 4))
    name = random.choice((*TOPOLOGIES, "usual"))
    costs = default_device("cpu") if name == "usual" else machine_of(f"{name}x{devices}").costs
    options = {
        "fixed": _fixed(random),
        "seed": seed,
        "moves": random.choice((1, 5, 20, 60)),
        "every_rank": random.random() < 0.7,
    }
    batch = {"x": x, "y": torch.randint(CLASSES, (samples,))}
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


def outcome(case: Case, random: Random) -> str:
    """The outcome: "ran", "none found" where the search finds nothing, or what is wrong, in words."""
    options = dict(case.options)
    try:
        if (
            random.random() >= 0.5
        ):  # a limit between the least memory that is known and that of the quickest
            tried = case.search(**options).tried
            held = [each.memory for each in tried if each.memory is not None]
            options["memory_limit"] = random.randint(min(held), max(held))
        found = case.search(**options)
    except UserError as error:
        return f"none found: {str(error)[:60]}"
    limit, told = options.get("memory_limit"), found.simulation.memory
    if limit is not None and (told is None or told.total > limit):
        return "above the limit"
    return ran(case, found.best)


def ran(case: Case, strategy: Strategy) -> str:
    """Says "ran" where a strategy trains as plain PyTorch does and holds what its plan says; else what is wrong."""
    training = Training(case.model, class_loss, [case.batch] * STEPS, adamw)
    expected, _ = training.plainly(1)
    stages = strategy.stages
    named = () if isinstance(stages, int) else stages
    ranks = torch.arange(torch.tensor(strategy.grid).prod().item()).reshape(*strategy.grid).tolist()
    if named:
        ranks = sorted({rank for stage in named for rank in stage.placement.ranks})
    with weft.local_world(torch.tensor(ranks).numel()):
        program = training.compile(ranks, strategy)
        losses = [program.step(case.batch).item() for _ in range(STEPS)]
        memory = [
            (one.measured.peak, one.predicted.peak) for one in program.memory() if one.measured
        ]
        program.close()
    if loss_distance(losses, expected) > 1e-4:
        return f"losses {losses} in place of {expected}"
    most = max(measured / predicted for measured, predicted in memory)
    return "ran" if most <= 1 else f"more memory than the plan says: {most:.3f} of it"


def tried(seed: int) -> str:
    """The outcome of a seed's search; an error is one, too."""
    try:
        return outcome(case_of(seed), Random(seed))
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


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
    new = set(range(chosen.seed, chosen.seed + chosen.searches)) - known.keys()
    for number, seed in enumerate(sorted(new), 1):
        said = known[seed] = tried(seed)
        # Without what stands only for one seed, most first.
        counts = dict(Counter(each.partition(":")[0] for each in known.values()).most_common())
        if said.partition(":")[0] not in FINE:
            print(f"seed {seed}: {said[:300]}", flush=True)
        if chosen.json:
            told = {
                "searches": len(known),
                "counts": counts,
                "outcomes": dict(sorted(known.items())),
            }
            chosen.json.write_text(json.dumps(told, indent=1) + "\n")
        if number % EACH == 0 or number == len(new):
            print(f"{len(known)} searches: {counts}", flush=True)


if __name__ == "__main__":
    main()
