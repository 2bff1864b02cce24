"""One rank of a job that a signal to the last rank ends, started by test_fit_on_processes.py."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import weft
from program.data.datasets import Drawn, example, loss_fn, net

SIZE = 10

if __name__ == "__main__":
    folder, out, workers = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks_process = os.getpid()
    model = net()
    program = weft.compile(
        *(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), example(SIZE)),
        placement=weft.placement("cpu", list(range(size))),
    )

    class Ending(Drawn):
        """Sends a signal to its process, and to the one that it loads for, after some samples."""

        def __getitem__(self, number: int) -> dict[str, Any]:
            if rank == size - 1 and len(self.asked) == 8:
                for pid in (os.getpid(), ranks_process):
                    os.kill(pid, signal.SIGTERM)
            return super().__getitem__(number)

    ended = weft.fit(
        *(program, weft.Loader(Ending(), SIZE, program, shuffle=True, workers=int(workers))),
        epochs=10_000,
        checkpoint=weft.Checkpoints(folder, every=10_000_000),
        log=[weft.logs.JsonLines(Path(folder).with_name("log.jsonl"))],
        log_every=1,
    )
    Path(out, f"{rank}.json").write_text(json.dumps([ended.steps, ended.why]))
