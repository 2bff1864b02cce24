"""Data parallel GPT against DistributedDataParallel: same weights, same batches, same processes, one thread each.

    OMP_NUM_THREADS=1 PYTHONPATH=. weft run -n 2 benchmarks/data_parallel.py

Both sides start from the same weights and update with torch's fused AdamW; their losses must agree.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import weft
from benchmarks.measure import Step, compare, interleave, save
from examples.gpt_model import GPT, Batch, loss_fn

RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="weft against DistributedDataParallel.")
    sizes = {"layers": 6, "width": 512, "heads": 8, "length": 256, "batch": 8}
    for name, size in {**sizes, "rounds": 7, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args()


def peer_step(model: GPT, batch: Batch, losses: list[float]) -> Step:
    """One step of DDP on this rank's part of the batch; the loss is the mean over the ranks."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    parallel = DistributedDataParallel(model)
    part = {name: tensor.chunk(RANKS)[RANK] for name, tensor in batch.items()}

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_fn(parallel, part)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / RANKS)

    return step


def own_step(model: GPT, batch: Batch, losses: list[float]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    program = weft.compile(
        model,
        loss_fn,
        optimizer,
        batch,
        placement=weft.placement("cpu", range(RANKS)),
        strategy=weft.data_parallel(),
    )
    return lambda: losses.append(float(program.step(batch)))


def main() -> None:
    o = options()
    torch.manual_seed(0)
    model = GPT(o.layers, o.width, o.heads, o.length)
    tokens = torch.randint(256, (o.batch, o.length + 1))
    batch = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    losses: dict[str, list[float]] = {"weft": [], "ddp": []}
    sides = {
        "weft": own_step(model, batch, losses["weft"]),
        "ddp": peer_step(model, batch, losses["ddp"]),
    }
    seconds = interleave(sides, o.rounds, o.steps, before=dist.barrier)
    pairs = zip(losses["weft"], losses["ddp"], strict=True)
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    if difference > 1e-3:
        raise AssertionError(f"the losses of both sides differ by {difference:.1e}")
    if RANK == 0:
        found = compare(seconds, "weft", "ddp")
        settings = {**vars(o), "ranks": RANKS, "max_relative_loss_difference": difference}
        save("data_parallel", {**settings, **found, "bound": "speed_relative_to_peer >= 0.9"})


if __name__ == "__main__":
    main()
