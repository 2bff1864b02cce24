"""One rank that trains and traces; then rank 0 alone asks for a trace."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import weft
from models import GPT, token_batch, token_loss
from weft.errors import RankFailure
from weft.runtime.world import distributed

folder = Path(sys.argv[1])
world = distributed.DistributedWorld("cpu", timeout=5)
distributed._lasting_worlds["cpu"] = world
model = GPT()
optimizer = torch.optim.AdamW(model.parameters())
placement = weft.placement("cpu", [0, 1])
program = weft.compile(model, token_loss, optimizer, token_batch(4), placement=placement)
for _ in range(3):
    program.step(token_batch(4))
trace = program.trace(folder / "trace.json")
assert [rank.rank for rank in trace] == [0, 1]
assert trace.exposed > 0
if world.rank == 0:
    try:
        program.trace()
    except RankFailure as error:
        (folder / "alone.txt").write_text(str(error))
else:
    for _ in range(200):
        if (folder / "alone.txt").exists():
            break
        time.sleep(0.05)
