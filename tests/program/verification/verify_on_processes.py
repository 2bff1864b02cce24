"""One rank of a job, started by test_verify.py: what a check finds on real processes, for each case."""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import weft
from models import GPT, token_batch, token_loss
from weft.capture.python import side_effects

S = weft.split
RANK = int(os.environ["RANK"])
PAIR = weft.placement("cpu", [0, 1])
STRATEGIES: dict[str, tuple[weft.Strategy, Any]] = {
    "tensor": (weft.tensor_parallel(["blocks.*.up"], ["blocks.*.down"]), "whole"),
    "zero": (weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(3), clip_norm=0.1), "whole"),
    "stages": (weft.Strategy(batch={"*": S(0)}, stages=2, micro_batches=2), "whole"),
    "own rows": (weft.data_parallel(), "local"),
}


def program(loss_fn: Any, strategy: weft.Strategy, batch: Any) -> tuple[weft.Program, Any]:
    torch.manual_seed(0)
    model = GPT(layers=1, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    example = token_batch(4)
    if batch == "local":
        example = {key: leaf[2 * RANK :][:2] for key, leaf in example.items()}
    options: Any = {"placement": PAIR, "strategy": strategy, "batch": batch}
    return weft.compile(model, loss_fn, optimizer, example, **options), example


def agrees(strategy: weft.Strategy, batch: str) -> str:
    found, example = program(token_loss, strategy, batch)
    text = ""
    for _ in range(2):
        text = str(found.verify(example))
        found.step(example)
    found.close()
    return text


def differs() -> str:
    side_effects._moves = lambda value: False  # as if capture did not see iterators
    numbers = count(1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        # On one rank alone the plain step is another.
        return token_loss(model, batch) * (2.0 if next(numbers) > 1 and RANK == 1 else 1.0)

    found, example = program(loss, weft.data_parallel(), "whole")
    try:
        return str(found.verify(example))
    except weft.errors.VerificationError as error:
        found.step(example)
        return str(error)


if __name__ == "__main__":
    results = {name: agrees(*options) for name, options in STRATEGIES.items()}
    results["differs"] = differs()
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(results))
