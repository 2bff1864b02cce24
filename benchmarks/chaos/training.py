"""The run that faults are tried on, one rank of it: a small net, checkpoints, and a fault at a moment of a rank.

    weft run -n 3 --restarts 2 training.py FOLDER

The folder has "fault.json" (`Fault`), and gets the losses and samples of each step, and the last parameters.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import weft
from weft.program.checkpoint import files, load, save
from weft.program.planning.variants import Planner

SAMPLES, BATCH, STEPS, EVERY = 48, 12, 24, 3
WIDTH, CLASSES = 8, 4
# In which the network is cut.
CUT_SECONDS = 10.0
# Moments at which a fault may come; how often each comes in a run, about.
MOMENTS = {"start": 1, "compile": 1, "sample": 300, "step": STEPS, "save": 8, "load": 3}


class Net(nn.Module):
    """A net with dropout, whose draws hang on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(WIDTH, 16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.dropout(torch.tanh(self.hidden(x))))
        return found


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of a batch."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


class Samples(Dataset[dict[str, Any]]):
    """Samples that draw, by number."""

    def __init__(self, moments: Moments | None = None) -> None:
        self.moments = moments

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self.moments is not None:
            self.moments.come("sample")
        x = torch.randn(WIDTH, dtype=torch.float64) + number / SAMPLES
        return {"x": x, "y": number % CLASSES, "number": number}


def net() -> nn.Module:
    """The net with its first values."""
    torch.manual_seed(0)
    return Net().double()


def example() -> dict[str, Tensor]:
    """A batch's shapes."""
    return {
        "x": torch.zeros(BATCH, WIDTH, dtype=torch.float64),
        "y": torch.zeros(BATCH, dtype=torch.long),
        "number": torch.zeros(BATCH, dtype=torch.long),
    }


class Moments:
    """Counts the moments of this rank, and does what the fault says when its moment has come, in one start alone.

    Args:
        folder: with "fault.json"; "done" in it says that the fault has come.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._fault = json.loads((folder / "fault.json").read_text())
        self._mine = self._fault["rank"] == rank
        self._done = folder / "done"
        self._count = 0

    def come(self, moment: str) -> None:
        """A moment comes."""
        if not self._mine or moment != self._fault["moment"] or self._done.exists():
            return
        self._count += 1
        if self._count == self._fault["count"]:
            self._done.write_text(repr(time.time()))
            if self._fault["how"] == "cut":
                self._until_cut()
            else:
                _HOWS[self._fault["how"]]()

    def _until_cut(self) -> None:
        """Go on once the network is cut, which who started the run does, and says by a file."""
        end = time.monotonic() + CUT_SECONDS
        while not self._done.with_name("cut").exists() and time.monotonic() < end:
            time.sleep(0.001)


def _wait_for_ever() -> None:
    while True:
        signal.pause()


def _raise() -> None:
    raise ValueError("a fault of this test")


def _full() -> None:
    raise OSError(28, "No space left on device")


_HOWS: dict[str, Any] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": _wait_for_ever,
    "raise": _raise,
    "exit": lambda: sys.exit(0),
    "leave": lambda: os._exit(3),
    "full": _full,
}


def main(folder: Path) -> None:
    """Train, with the moments of the run's fault."""
    moments = Moments(folder, int(os.environ["RANK"]))
    _before(save, "write_file", moments, "save")
    _before(load, "check_extents", moments, "load")
    _before(Planner, "plan", moments, "compile")
    train(folder, moments)


def train(folder: Path, moments: Moments) -> None:
    """Train, with a checkpoint each few steps, from the newest on."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    moments.come("start")
    model = net()
    program = weft.compile(
        *(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-2), example()),
        placement=weft.placement("cpu", list(range(size))),
        strategy=weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
        seed=5,
    )
    kept = weft.Checkpoints(folder / "kept", every=EVERY, keep=3, wait=False)
    loader = weft.Loader(Samples(moments), BATCH, shuffle=True, drop_last=True, seed=2)
    kept.load_newest(program, {"loader": loader})
    for batch in _epochs(loader, program):
        moments.come("step")
        loss = program.step(batch).item()
        if rank == 0:
            row = [program.steps, loss, sorted(batch["number"].tolist())]
            with (folder / "steps").open("a") as opened:
                opened.write(json.dumps(row) + "\n")
        kept.save_when_due(program, {"loader": loader})
        if program.steps >= STEPS:
            break
    state = program.full_state_dict()
    program.close()
    if rank == 0:
        files.write_file(
            folder,
            "last.safetensors",
            {n: (tuple((0, s) for s in x.shape), x) for n, x in state.items()},
        )


def _epochs(loader: weft.Loader, program: weft.Program) -> Iterator[dict[str, Tensor]]:
    """Batches, as long as steps are to be made: none where the run went on from its last one."""
    while program.steps < STEPS:
        yield from loader


def _before(holder: Any, name: str, moments: Moments, moment: str) -> None:
    """Let a moment come before a function of a module or class is called."""
    own = getattr(holder, name)

    def called(*arguments: Any, **named: Any) -> Any:
        moments.come(moment)
        return own(*arguments, **named)

    setattr(holder, name, called)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
