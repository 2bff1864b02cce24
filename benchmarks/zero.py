"""ZeRO 3 on a GPT against FSDP2: same weights, same batches, same processes; seconds of a step and peak memory.

    OMP_NUM_THREADS=1 PYTHONPATH=. weft run -n 2 benchmarks/zero.py

FSDP2 shards every block, gathers it before its forward and again before its backward. Both sides update with torch's
fused AdamW, and their losses must agree. Memory is what tensors take on this rank at their most, from the shards on:
`Program.memory` measures weft's, torch's profiler what FSDP2 allocates.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import weft
from benchmarks.measure import compare, interleave, save
from examples.gpt_model import GPT, Batch, loss_fn

RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="weft's ZeRO 3 against FSDP2.")
    sizes = {"layers": 6, "width": 512, "heads": 8, "length": 256, "batch": 8}
    for name, size in {**sizes, "rounds": 7, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args()


class Peer:
    """FSDP2 on this rank's part of the batch; the loss is the mean over the ranks."""

    def __init__(self, model: GPT, batch: Batch) -> None:
        self.model = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.part = {name: tensor.chunk(RANKS)[RANK] for name, tensor in batch.items()}
        self.losses: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = loss_fn(self.model, self.part)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.losses.append(total.item() / RANKS)

    def peak(self) -> int:
        """Bytes that tensors take at most in one more step."""
        self.optimizer.zero_grad()
        held = [*self.model.parameters(), *self.part.values()]
        held += [each for state in self.optimizer.state.values() for each in state.values()]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.step()
        self.losses.pop()
        most = now = 0
        for size in allocations(profiler):
            now += size
            most = max(most, now)
        return most + sum(map(local_bytes, held))


def allocations(profiler: profile) -> Iterator[int]:
    """What was allocated, and, as a negative number, freed, in the order of time."""
    results: Any = profiler.profiler
    trees = results.kineto_results.experimental_event_tree()
    found = [event for event in flat(trees) if event.name == "[memory]"]
    for event in sorted(found, key=lambda event: event.start_time_ns):
        yield int(event.extra_fields.alloc_size)


def flat(events: Iterable[Any]) -> Iterator[Any]:
    """Events with those within them."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event


def local_bytes(tensor: Tensor) -> int:
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.nbytes)


def own_program(model: GPT, batch: Batch) -> weft.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    strategy = weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(level=3))
    placement = weft.placement("cpu", range(RANKS))
    return weft.compile(model, loss_fn, optimizer, batch, placement=placement, strategy=strategy)


def main() -> None:
    o = options()
    torch.manual_seed(0)
    model = GPT(o.layers, o.width, o.heads, o.length)
    tokens = torch.randint(256, (o.batch, o.length + 1))
    batch = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    program, peer, losses = own_program(model, batch), Peer(model, batch), list[float]()
    sides = {"weft": lambda: losses.append(float(program.step(batch))), "fsdp2": peer.step}
    seconds = interleave(sides, o.rounds, o.steps, before=dist.barrier)
    pairs = zip(losses, peer.losses, strict=True)
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    if difference > 1e-3:
        raise AssertionError(f"the losses of both sides differ by {difference:.1e}")
    memory, theirs = program.memory()[RANK], peer.peak()
    assert memory.measured is not None
    if RANK == 0:
        found = {
            **compare(seconds, "weft", "fsdp2"),
            "weft_peak_bytes": memory.measured.peak,
            "weft_peak_bytes_predicted": memory.predicted.peak,
            "fsdp2_peak_bytes": theirs,
            "peak_relative_to_peer": memory.measured.peak / theirs,
        }
        settings = {**vars(o), "ranks": RANKS, "max_relative_loss_difference": difference}
        bound = "speed_relative_to_peer >= 1, peak_relative_to_peer <= 1"
        save("zero", {**settings, **found, "bound": bound})


if __name__ == "__main__":
    main()
