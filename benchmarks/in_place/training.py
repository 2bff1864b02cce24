"""One rank of the runs that `python -m benchmarks.in_place` makes: a GPT, whose last rank kills itself once.

    weft run -n 4 --restarts 1 training.py FOLDER elastic|plain

The folder gets a line for each moment, as JSON: its name and when it came, in seconds of the clock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import weft
from benchmarks.goodput.training import BATCH, HEADS, LAYERS, LENGTH, WIDTH, WORDS, Texts, loss_fn
from benchmarks.works.transformers import GPT
from weft.runtime.world.variables import RESTART

# Steps before the death, and of the whole run.
BEFORE, STEPS = 6, 9


def train(folder: Path) -> None:
    """Train from the newest snapshot on; of the second start, write moments down."""
    rank, size, start = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", RESTART))

    def note(moment: str, here: bool = True) -> None:
        if here:
            with (folder / "times").open("a") as opened:
                opened.write(json.dumps([moment, time.time()]) + "\n")

    again = start == 1 and rank == 0
    note("begun", again)
    torch.manual_seed(0)
    model = GPT(LAYERS, WIDTH, HEADS, LENGTH, WORDS)
    words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    program = weft.compile(
        *(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-4), {"x": words, "y": words}),
        placement=weft.placement("cpu", range(size)),
        strategy=weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(1)),
    )
    note("compiled", again)
    loader = weft.Loader(Texts(), BATCH, program, shuffle=True, drop_last=True)
    kept = weft.Checkpoints(folder / "kept", every=1000, memory_every=1)
    kept.load_newest(program, {"loader": loader})
    note("loaded", again)
    first = program.steps
    for batch in loader:
        if start == 0 and program.steps == BEFORE and rank == size - 1:
            note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        program.step(batch).item()
        note("stepped", again and program.steps == first + 1)
        kept.save_when_due(program, {"loader": loader})
        if program.steps >= STEPS:
            break
    if first not in ((BEFORE - 1, BEFORE) if start else (0,)):
        raise RuntimeError(f"start {start} went on from step {first}, not {BEFORE * start}")
    program.close()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if sys.argv[2] == "elastic":
        weft.elastic(lambda: train(place))
    else:
        train(place)
