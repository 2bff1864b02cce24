"""Reports of small runs, of plans and of a search, that several tests look at."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

import weft
from models import GPT, token_batch, token_loss
from weft.compiler.pipeline import Compiled
from weft.layout import Placement
from weft.planning.machine import machine_of
from weft.planning.plans import plan_stored, planned_step, priced_step
from weft.planning.stored_step import StoredStep
from weft.simulator.simulation import Simulation
from weft.strategy.strategy import Strategy


def write_run(path: Path, steps: int = 1, **entries: Any) -> None:
    """The report of a program that has made some steps on two ranks."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    strategy = {"batch": {"*": weft.split(0)}, "zero": weft.Zero(3), **entries}
    with weft.local_world(2):
        program = weft.compile(
            *(model, token_loss, optimizer, token_batch(4)),
            placement=weft.placement("cpu", [0, 1]),
            strategy=weft.Strategy(**strategy),
        )
        with program.recording():
            for _ in range(steps):
                program.step(token_batch(4))
        program.report(path)
        program.close()


@cache
def stored(layers: int = 2) -> StoredStep:
    """The step of a small decoder."""
    torch.manual_seed(0)
    model = GPT(layers=layers)
    optimizer = torch.optim.AdamW(model.parameters())
    return weft.Job(model, token_loss, optimizer, token_batch(8)).stored()


def planned(strategy: Strategy, grid: tuple[int, ...]) -> tuple[Compiled, Simulation]:
    """It on so many devices that need not be there."""
    ranks = torch.Size(grid).numel()
    machine = machine_of(f"h100x{ranks}")
    place = Placement("cuda", grid, tuple(range(ranks)))
    compiled = plan_stored(stored(), strategy, place, costs=machine.planned)
    return compiled, priced_step(planned_step(stored().graph, compiled), machine.costs).simulation
