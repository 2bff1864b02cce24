"""One rank of a job that trains by a loader, started by test_processes.py: its losses, queues, and what it loaded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import weft
from program.data.datasets import Drawn, example, loss_fn, net
from weft.program.data.loader import COMPARED

SIZE = 18
S, B = weft.split, weft.broadcast
# With so few rows in the last batch of an epoch that some ranks take none.
FEW = 7
LAYOUTS = {
    "data": weft.Strategy(batch={"*": S(0)}),
    "micro": weft.Strategy(batch={"*": S(0)}, micro_batches=3),
    "stages": weft.Strategy(batch={"*": S(0)}, stages=2, micro_batches=3),
    "few": weft.Strategy(batch={"*": S(0)}),
    "whole": weft.Strategy(batch={"*": B}),
}

if __name__ == "__main__":
    layout, out = sys.argv[1:]
    size = int(os.environ["WORLD_SIZE"])
    model = net()
    program = weft.compile(
        *(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), example(SIZE)),
        placement=weft.placement("cpu", list(range(size))),
        strategy=LAYOUTS[layout],
    )
    data = Drawn()
    size_of_batch = FEW if layout == "few" else SIZE
    last = layout in ("data", "few")
    loader = weft.Loader(data, size_of_batch, program, shuffle=True, drop_last=not last)
    losses = [float(program.step(batch)) for _ in range(2) for batch in loader]
    queues: list[list[str]] = []
    if layout in ("data", "micro"):  # one epoch more, loaded and cut ahead
        ahead = weft.Loader(
            *(data, size_of_batch, program), shuffle=True, drop_last=not last, workers=1
        )
        ahead.load_state_dict(loader.state_dict())
        losses += map(float, program.run(ahead))
        queues = [[queue for queue, _ in each.queues] for each in program.trace()]
    found = [losses, queues, data.asked[2 * COMPARED :][: SIZE // size], len(data.asked)]
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
