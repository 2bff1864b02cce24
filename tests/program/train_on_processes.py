"""One rank of training jobs, started by test_processes.py: FOLDER JOB… trains each, and writes losses and states."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from mixtures import for_both, word_batch
from models import (
    GPT,
    ResNet,
    classification_loss,
    image_batch,
    token_batch,
    token_loss,
)
from program.live_models import eager_step, generated, norms
from single_device import whole_state

S, B = weft.split, weft.broadcast
GRID = {2: [0, 1], 4: [[0, 1], [2, 3]]}[int(os.environ["WORLD_SIZE"])]
HYBRID = weft.hybrid_parallel(["blocks.*.qkv", "blocks.*.up"], ["blocks.*.proj", "blocks.*.down"])
COLUMNS = weft.tensor_parallel(["blocks.*.qkv", "blocks.*.up"], ["blocks.*.proj", "blocks.*.down"])
JOBS = {
    "gpt data": (GPT, token_loss, token_batch, weft.data_parallel()),
    "gpt tensor": (
        GPT,
        token_loss,
        token_batch,
        HYBRID if len(GRID) == 2 and GRID != [0, 1] else COLUMNS,
    ),
    "gpt dropout": (lambda: GPT(dropout=0.2), token_loss, token_batch, weft.data_parallel()),
    "gpt stages": (
        GPT,
        token_loss,
        token_batch,
        weft.Strategy(batch={"*": S(0)}, stages=2, micro_batches=2),
    ),
    "experts": (for_both, token_loss, word_batch, weft.expert_parallel(["*.up", "*.down"])),
    "resnet data": (ResNet, classification_loss, image_batch, weft.data_parallel()),
}


def main(out: Path, names: list[str]) -> None:
    rank = int(os.environ["RANK"])
    results = {}
    for name in names:
        make_model, loss_fn, make_batch, strategy = JOBS[name]
        # Every rank starts from other weights: those of rank 0 must count.
        torch.manual_seed(rank)
        model = make_model().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
        program = weft.compile(
            model,
            loss_fn,
            optimizer,
            make_batch(4),
            placement=weft.placement("cpu", GRID),
            strategy=strategy,
            seed=11,
        )
        losses = [program.step(make_batch(4, seed=seed)).item() for seed in range(3)]
        state = {key: value.tolist() for key, value in program.full_state_dict().items()}
        results[name] = {"losses": losses, "state": state}
        if name.startswith("gpt") and "dropout" not in name:
            # The live model says the same, and eager code goes on with it between steps.
            assert {key: x.tolist() for key, x in whole_state(model).items()} == state
            states = program.full_optimizer_state_dict()["state"]
            results[name]["states"] = norms(states)
            results[name]["tokens"] = generated(model)
            batch = make_batch(4, seed=3)
            results[name]["eager"] = eager_step(model, optimizer, batch, token_loss)
            results[name]["last"] = program.step(make_batch(4, seed=4)).item()
        program.close()
    (out / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
