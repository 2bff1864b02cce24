"""Seconds and bytes a second of saving and loading: weft beside torch.distributed.checkpoint and torch.save.

    python -m benchmarks.checkpoints --megabytes 400 --rounds 5 --json runs/checkpoints.json

One process, one model of linear layers with AdamW, on the disk of `--folder`. All sides save and load turn by turn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import weft

WIDTH = 1024
NAMES = ("weft", "torch.distributed.checkpoint", "torch.save")
# Parameters, and two moments of each.
COPIES = 3


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss, by which states come to be."""
    found: torch.Tensor = model(batch).square().mean()
    return found


class Sides:
    """The systems, over one model and its states.

    Args:
        megabytes: of all tensors.
        folder: where they write.
    """

    def __init__(self, megabytes: int, folder: Path) -> None:
        layers = max(1, megabytes * 2**20 // (COPIES * 4 * WIDTH * WIDTH))
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batch = torch.randn(4, WIDTH)
        self.program = weft.compile(
            model, loss_fn, optimizer, batch, placement=weft.placement("cpu", [0])
        )
        self.program.step(batch)
        self.batch = batch
        self.state = {
            "model": self.program.full_state_dict(),
            "optimizer": dict(self.program.full_optimizer_state_dict()["state"]),
        }
        self.bytes = sum(x.nbytes for x in self.state["model"].values()) + sum(
            x.nbytes for each in self.state["optimizer"].values() for x in each.values()
        )
        self._folder = folder

    def path(self, name: str) -> Path:
        """The place of a side's files."""
        return self._folder / name

    def calls(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """How each side saves and loads."""
        flat = {f"optimizer.{n}": each for n, each in self.state["optimizer"].items()}
        state: dict[str, Any] = {"model": self.state["model"], **flat}
        weft_path, dcp, plain = (self.path(name) for name in NAMES)
        return {
            NAMES[0]: (lambda: self.program.save(weft_path), lambda: self.program.load(weft_path)),
            NAMES[1]: (
                lambda: save(state, storage_writer=FileSystemWriter(dcp), no_dist=True),
                lambda: load(state, storage_reader=FileSystemReader(dcp), no_dist=True),
            ),
            NAMES[2]: (
                lambda: self._plainly(state, plain),
                lambda: torch.load(plain / "all.pt", weights_only=True),
            ),
        }

    @staticmethod
    def _plainly(state: dict[str, Any], path: Path) -> None:
        path.mkdir()
        with (path / "all.pt").open("wb") as opened:
            torch.save(state, opened)


def seconds(call: Callable[[], object]) -> float:
    """The time that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def beside(sides: Sides, folder: Path, steps: int) -> dict[str, float]:
    """How long a step is held by a save that is written beside the next steps, and how much slower these are."""
    alone = [seconds(lambda: sides.program.step(sides.batch)) for _ in range(steps)]
    held = seconds(lambda: sides.program.save(folder / "beside", wait=False))
    meanwhile = []
    while not (folder / "beside").exists():
        meanwhile.append(seconds(lambda: sides.program.step(sides.batch)))
    sides.program.wait_for_saved()
    shutil.rmtree(folder / "beside")
    return {"held": held, "step": median(alone), "step meanwhile": median(meanwhile or [0.0])}


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Saving and loading, beside torch's ways.")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    warnings.simplefilter("ignore")
    took: dict[str, tuple[list[float], list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=o.folder) as made:
        folder = Path(made)
        sides = Sides(o.megabytes, folder)
        for turn in range(o.rounds):
            calls = list(sides.calls().items())
            for name, (saves, loads) in calls if turn % 2 else calls[::-1]:
                shutil.rmtree(sides.path(name), ignore_errors=True)
                pair = took.setdefault(name, ([], []))
                pair[0].append(seconds(saves))
                pair[1].append(seconds(loads))
        apart = [beside(sides, folder, 5) for _ in range(o.rounds)]
        sides.program.close()
    figures = {
        name: {"save": median(pair[0]), "load": median(pair[1]), "rounds": pair}
        for name, pair in took.items()
    }
    for name, each in figures.items():
        rate = sides.bytes / each["save"] / 1e9
        print(f"{name:30} save {each['save']:6.2f} s ({rate:.2f} GB/s), load {each['load']:6.2f} s")
    kept = {key: median(each[key] for each in apart) for key in apart[0]}
    text = ", ".join(f"{name} {value:.3f} s" for name, value in kept.items())
    print(f"beside the steps: {text}")
    if o.json:
        o.json.write_text(json.dumps({"bytes": sides.bytes, "sides": figures, "beside": apart}))


if __name__ == "__main__":
    main()
