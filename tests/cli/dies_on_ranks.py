"""A run in which a rank dies once, started by test_restarts.py: losses by step, of all its starts.

    dies_on_ranks.py FOLDER DEATHS [host]

"host" has the rank's launcher die, too.
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

if __name__ == "__main__":
    folder, deaths, host = Path(sys.argv[1]), int(sys.argv[2]), "host" in sys.argv[3:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    started = int(os.environ["WEFT_RESTART"])
    model = net()
    program = weft.compile(
        *(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), example(SIZE)),
        placement=weft.placement("cpu", list(range(size))),
        strategy=weft.Strategy(batch={"*": weft.split(0)}),
        kernels="aten",
    )

    def note(step: int, figures: weft.logs.Figures) -> None:
        with (folder / "losses").open("a") as opened:
            opened.write(json.dumps([started, size, step, figures["loss"]]) + "\n")

    class Dying(Drawn):
        """Ends the last rank in the first starts, in its second epoch."""

        def __getitem__(self, number: int) -> dict[str, object]:
            if started < deaths and rank == size - 1 and program.steps == 5 + started:
                if host:
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(number)

    weft.fit(
        *(program, weft.Loader(Dying(), SIZE, program, shuffle=True, drop_last=True)),
        steps=8,
        checkpoint=weft.Checkpoints(folder / "kept", every=1),
        log=[note],
        log_every=1,
    )
