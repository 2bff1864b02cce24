"""What the examples of the gallery share: options, ranks, and the same steps in plain PyTorch beside those of weft.

weft run -n 2 examples/NAME.py --strategy STRATEGY
python examples/NAME.py --strategy STRATEGY        both ranks as threads of this process
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import weft

# Steps that --check compares, and how far a loss may be off, as a part of itself.
CHECKED, TOLERANCE = 3, 1e-4
Strategies = Mapping[str, weft.Strategy]
Loss = Callable[..., Tensor]


class Plain:
    """A copy of a model and its optimizers, for plain PyTorch in this process; to be made before `weft.compile`.

    `trained` are loss functions, each with the optimizer of what it trains.
    """

    def __init__(self, model: nn.Module, *trained: tuple[Loss, torch.optim.Optimizer]) -> None:
        self.model, self.trained = copy.deepcopy((model, trained))

    def step(self, batch: Any) -> list[float]:
        """The losses of a step."""
        losses = []
        for loss_fn, optimizer in self.trained:
            self.model.zero_grad()
            loss = loss_fn(self.model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


class Run:
    """One run of an example, as its command line asks for it; `words` stand in for that."""

    def __init__(
        self, about: str | None, strategies: Strategies, steps: int, words: Sequence[str] | None
    ) -> None:
        parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
        parser.add_argument("--strategy", choices=strategies, default=next(iter(strategies)))
        parser.add_argument("--steps", type=int, default=steps)
        parser.add_argument("--check", action="store_true", help="first steps in plain PyTorch too")
        parser.add_argument("--report", type=Path, help="an HTML file to write at the end")
        asked = parser.parse_args(words)
        if asked.steps < 1:
            parser.error(f"--steps takes a number from 1, found {asked.steps}")
        self.steps, self.check, self.report = asked.steps, asked.check, asked.report
        self.strategy = strategies[asked.strategy]
        self.ranks = int(os.environ.get("WORLD_SIZE", "2"))
        stages = self.strategy.stages
        count = stages if isinstance(stages, int) else len(stages)
        if count and (self.ranks % count if stages == count else self.ranks != count):
            parser.error(
                f"--strategy {asked.strategy} has {count} stages: start {count} ranks, found {self.ranks}"
            )

    def world(self) -> AbstractContextManager[object]:
        """The ranks: the processes that `weft run` has started, or threads of this process."""
        return nullcontext() if "WORLD_SIZE" in os.environ else weft.local_world(self.ranks)

    @property
    def placement(self) -> weft.Placement:
        """All ranks; in a row for each stage where the strategy says how many there are."""
        ranks, stages = torch.arange(self.ranks), self.strategy.stages
        rows = ranks.reshape(stages, -1) if isinstance(stages, int) else ranks
        return weft.placement("cpu", rows.tolist())

    def say(self, text: str) -> None:
        """Print a line, once for all ranks."""
        if os.environ.get("RANK", "0") == "0":
            print(text, flush=True)

    def train(self, batches: Sequence[Any], plain: Plain, *programs: weft.Program) -> None:
        """A step of each program with each batch; with --check, the first ones in plain PyTorch too."""
        losses, seconds, off = [], [], 0.0
        for step, batch in enumerate(batches):
            start = time.perf_counter()
            losses.append([float(program.step(batch)) for program in programs])
            seconds.append(time.perf_counter() - start)
            if self.check and step < CHECKED:
                pairs = zip(losses[-1], plain.step(batch))
                off = max(off, *(distance(step, found, expected) for found, expected in pairs))
        first, last = (", ".join(f"{x:.3f}" for x in losses[step]) for step in (0, -1))
        checked = f", as plain PyTorch to {off:.0e}" if self.check else ""
        took = f"{1e3 * statistics.median(seconds):.1f} ms a step"
        self.say(f"loss {first} to {last} in {len(losses)} steps{checked}; {took}")

    def finish(self, *programs: weft.Program) -> None:
        """Write the report of the last program, if it is asked for, and close all."""
        if self.report is not None:
            programs[-1].report(self.report)
        for program in programs:
            program.close()


def distance(step: int, found: float, expected: float) -> float:
    """How far a loss is off, as a part of itself; where that is more than rounding, the end of the run."""
    if not math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=1e-6):
        raise SystemExit(f"step {step}: loss {found!r}, but {expected!r} in plain PyTorch")
    return abs(found - expected) / max(abs(expected), 1e-6)
