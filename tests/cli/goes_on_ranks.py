"""A run whose ranks go on in place, started by test_in_place.py: losses by step, with start, size and process.

    goes_on_ranks.py FOLDER RANK HOW [global]

RANK of the first start, at its sixth step, does what HOW says: "kill", "stop", "raise"; or "twice" kills one in the
second start, too. "global" has the model stand outside of the function.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from program.data.datasets import Drawn, example, loss_fn, net

SIZE = 12
FOLDER, RANK, HOW = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
MODELS = [net()] if "global" in sys.argv else []


def train() -> None:
    rank, size, start = (int(os.environ[x]) for x in ("RANK", "WORLD_SIZE", "WEFT_RESTART"))
    model = MODELS[0] if MODELS else net()
    program = weft.compile(
        *(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), example(SIZE)),
        placement=weft.placement("cpu", list(range(size))),
        strategy=weft.Strategy(batch={"*": weft.split(0)}),
        kernels="aten",
    )

    def note(step: int, figures: weft.logs.Figures) -> None:
        with (FOLDER / "losses").open("a") as opened:
            opened.write(json.dumps([start, size, os.getpid(), step, figures["loss"]]) + "\n")

    class Failing(Drawn):
        """Samples, one of which never comes."""

        def __getitem__(self, number: int) -> dict[str, object]:
            last = program.steps == 5 + start
            if start == 0 and rank == RANK and last:
                fail()
            if HOW == "twice" and start == 1 and rank == size - 1 and last:
                fail()
            return super().__getitem__(number)

    weft.fit(
        *(program, weft.Loader(Failing(), SIZE, program, shuffle=True, drop_last=True)),
        steps=8,
        checkpoint=weft.Checkpoints(FOLDER / "kept", every=100, memory_every=1),
        log=[note],
        log_every=1,
    )


def fail() -> None:
    if HOW == "raise":
        raise ValueError("a failure of its own")
    os.kill(os.getpid(), signal.SIGSTOP if HOW == "stop" else signal.SIGKILL)


if __name__ == "__main__":
    (FOLDER / "memory").write_text(os.environ["WEFT_SNAPSHOTS"])
    torch.manual_seed(int(sys.argv[2]))
    weft.elastic(train)
