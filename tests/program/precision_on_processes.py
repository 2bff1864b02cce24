"""One rank of a training job with masters, started by test_precision.py: trains, writes losses and masters."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from models import GPT, token_batch, token_loss

STRATEGY = weft.Strategy(
    batch={"*": weft.split(0)},
    parameters={"*": weft.broadcast},
    zero=weft.Zero(3),
    micro_batches=2,
    precision=weft.Precision(masters=True, reduce="fp32"),
    clip_norm=1.0,
)


def train(ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and masters after three steps."""
    torch.manual_seed(0)
    model = GPT().bfloat16()
    program = weft.compile(
        model,
        token_loss,
        torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, fused=True),
        token_batch(8),
        placement=weft.placement("cpu", list(range(ranks))),
        strategy=STRATEGY,
        seed=11,
    )
    losses = [program.step(token_batch(8, seed=seed)).item() for seed in range(3)]
    masters = program.full_state_dict(masters=True)
    program.close()
    return losses, masters


if __name__ == "__main__":
    losses, masters = train(int(os.environ["WORLD_SIZE"]))
    state = {key: value.tolist() for key, value in masters.items()}
    result = json.dumps({"losses": losses, "masters": state})
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(result)
