"""One rank of the run that `python -m benchmarks.goodput` measures: a GPT, and a rank that dies at given steps.

    weft run -n 2 --restarts 3 training.py FOLDER

The folder has "run.json" (`Run`), and gets a line for each step that was made: its number, when it ended, the start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import weft
from benchmarks.works.transformers import GPT
from weft.runtime.world.variables import RESTART

LAYERS, WIDTH, HEADS, LENGTH, WORDS, BATCH = 6, 512, 8, 128, 1024, 16


@dataclass(frozen=True)
class Run:
    """What the ranks do.

    Attributes:
        steps: of the run.
        every: steps between checkpoints; 0 for none.
        deaths: the last rank kills itself before these steps, one in each start.
    """

    steps: int
    every: int
    deaths: tuple[int, ...]


class Texts(Dataset[dict[str, Tensor]]):
    """Random words by number."""

    def __len__(self) -> int:
        return 64 * BATCH

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        words = torch.randint(WORDS, (LENGTH + 1,))
        return {"x": words[:-1], "y": words[1:]}


def loss_fn(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of the next word."""
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def main(folder: Path) -> None:
    """Train from the newest checkpoint on."""
    run = Run(**json.loads((folder / "run.json").read_text()))
    rank, size, start = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", RESTART))
    torch.manual_seed(0)
    model = GPT(LAYERS, WIDTH, HEADS, LENGTH, WORDS)
    words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    program = weft.compile(
        *(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-4), {"x": words, "y": words}),
        placement=weft.placement("cpu", range(size)),
        strategy=weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(1)),
    )
    loader = weft.Loader(Texts(), BATCH, program, shuffle=True, drop_last=True)
    kept = weft.Checkpoints(folder / "kept", every=run.every or run.steps + 1, keep=2, wait=False)
    kept.load_newest(program, {"loader": loader})
    death = run.deaths[start] if start < len(run.deaths) else run.steps + 1
    for batch in _epochs(loader):
        if program.steps + 1 == death and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        program.step(batch).item()
        if rank == 0:
            with (folder / "steps").open("a") as opened:
                opened.write(json.dumps([program.steps, time.time(), start]) + "\n")
        kept.save_when_due(program, {"loader": loader})
        if program.steps >= run.steps:
            break
    program.close()


def _epochs(loader: weft.Loader) -> Iterator[dict[str, Tensor]]:
    while True:
        yield from loader


if __name__ == "__main__":
    main(Path(sys.argv[1]))
