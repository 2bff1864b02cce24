"""Seconds of saving and loading: weft beside torch.distributed.checkpoint and torch.save.

    python -m benchmarks.checkpoints --megabytes 400 --rounds 5

One process, one model of linear layers with AdamW, on the disk of `--folder`. All sides save, then load, turn by turn.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import weft
from benchmarks import measure

WIDTH = 1024
# Parameters, and two moments of each.
COPIES = 3


def trained(megabytes: int) -> tuple[weft.Program, Tensor]:
    """A program whose parameters and states take so many megabytes, after a step, and its batch."""
    layers = max(1, megabytes * 2**20 // (COPIES * 4 * WIDTH * WIDTH))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.randn(4, WIDTH)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    program = weft.compile(model, loss_fn, optimizer, batch, placement=weft.placement("cpu", [0]))
    program.step(batch)
    return program, batch


def beside(program: weft.Program, batch: Tensor, path: Path, steps: int) -> dict[str, float]:
    """How long a step is held by a save that is written beside the next steps, and how much slower these are."""

    def seconds(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    alone = [seconds(lambda: program.step(batch)) for _ in range(steps)]
    held = seconds(lambda: program.save(path, wait=False))
    meanwhile = []
    while not path.exists():
        meanwhile.append(seconds(lambda: program.step(batch)))
    program.wait_for_saved()
    shutil.rmtree(path)
    return {"held": held, "step": median(alone), "step meanwhile": median(meanwhile or [0.0])}


def main() -> None:
    """Measure, print, and write `runs/bench/checkpoints.json`."""
    parser = argparse.ArgumentParser(description="Saving and loading, beside torch's ways.")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    o = parser.parse_args()
    warnings.simplefilter("ignore")
    program, batch = trained(o.megabytes)
    states = program.full_optimizer_state_dict()["state"]
    state: dict[str, Any] = {"model": program.full_state_dict()}
    state |= {f"optimizer.{name}": each for name, each in states.items()}
    with tempfile.TemporaryDirectory(dir=o.folder) as made:
        own, dcp, plain = (Path(made, name) for name in ("weft", "dcp", "plain.pt"))

        def emptied() -> None:
            for path in (own, dcp):
                shutil.rmtree(path, ignore_errors=True)

        saves = {
            "weft": lambda: program.save(own),
            "torch.distributed.checkpoint": lambda: save(
                state, storage_writer=FileSystemWriter(dcp), no_dist=True
            ),
            "torch.save": lambda: torch.save(state, plain),
        }
        loads = {
            "weft": lambda: program.load(own),
            "torch.distributed.checkpoint": lambda: load(
                state, storage_reader=FileSystemReader(dcp), no_dist=True
            ),
            "torch.save": lambda: torch.load(plain, weights_only=True),
        }
        saved = measure.interleave(saves, o.rounds, 1, before=emptied)
        emptied()
        for each in saves.values():
            each()
        loaded = measure.interleave(loads, o.rounds, 1)
        apart = [beside(program, batch, Path(made, "beside"), 5) for _ in range(o.rounds)]
    program.close()
    size = sum(x.nbytes for each in state.values() for x in each.values())
    for name in saves:
        took, again = median(saved[name]), median(loaded[name])
        print(f"{name:30} save {took:6.2f} s ({size / took / 1e9:.2f} GB/s), load {again:6.2f} s")
    measure.save(
        "checkpoints", {"bytes": size, "save": saved, "load": loaded, "beside the steps": apart}
    )


if __name__ == "__main__":
    main()
