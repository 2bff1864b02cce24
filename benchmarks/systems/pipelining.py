"""torch.distributed.pipelining: 1F1B, interleaved 1F1B, zero bubble and ZBV.

Models of blocks are cut into as many blocks each; chains of modules where the parts take as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.functional import cross_entropy

from benchmarks.systems.system import Job, System
from benchmarks.works.llama import Llama, rotation


class Part(nn.Module):
    """Some blocks of a GPT or a Llama of `benchmarks.works`; the first part embeds tokens, the last makes logits."""

    def __init__(self, model: Any, number: int, parts: int) -> None:
        super().__init__()
        counts = even(len(model.blocks), parts)
        before = sum(counts[:number])
        self.blocks = model.blocks[before : before + counts[number]]
        self.first, self.last = number == 0, number == parts - 1
        # A Llama turns features by their positions in each block; a GPT adds an embedding of them once.
        self.rotated = model.size if isinstance(model, Llama) else 0
        if self.rotated and parts > 1 and model.head.weight is model.token.weight:
            raise ValueError("weights that the first and the last part share cannot be cut")
        if self.first:
            self.token = model.token
            self.position = None if self.rotated else model.position
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.first:
            tokens, x = x, self.token(x)
            if self.position is not None:
                x = x + self.position(torch.arange(length, device=tokens.device))
        by = (rotation(length, self.rotated, x),) if self.rotated else ()
        for block in self.blocks:
            x = block(x, *by)
        return self.head(self.norm(x)) if self.last else x


def even(count: int, parts: int) -> list[int]:
    """So many blocks for each part; what is left over goes to those in the middle, which embed and predict nothing."""
    least, rest = divmod(count, parts)
    middle = sorted(range(parts), key=lambda part: abs(2 * part + 1 - parts))[:rest]
    return [least + (part in middle) for part in range(parts)]


def parts_of(job: Job, parts: int) -> Callable[[int], nn.Module]:
    """From the number of a part of the job's model to the part. All ranks call it."""
    model = job.work.model()
    chain = list(job.work.chain(model))
    if not chain:
        return lambda number: Part(model, number, parts)
    found: list[Any] = [None]
    if job.rank == 0:
        x = job.work.batch()["x"]
        found = [balanced(seconds_of(job, chain, x[: len(x) // job.micro_batches]), parts)]
    dist.broadcast_object_list(found)
    ends = [0, *found[0], len(chain)]
    return lambda number: nn.Sequential(*chain[ends[number] : ends[number + 1]])


def balanced(seconds: Sequence[float], parts: int) -> tuple[int, ...]:
    """Where to cut so that the part that takes longest takes least."""

    def longest(cuts: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in pairwise((0, *cuts, len(seconds))))

    return min(combinations(range(1, len(seconds)), parts - 1), key=longest)


def seconds_of(job: Job, chain: Sequence[nn.Module], x: Tensor) -> list[float]:
    """Of each module of a chain: forward and backward of all micro-batches, and its update; the best of three."""
    found = []
    for module in map(deepcopy, chain):
        parameters = list(module.parameters())
        optimizer = job.work.optimizer(parameters) if parameters else None
        took = []
        for _ in range(3):
            begin = time.perf_counter()
            made = module(x.detach().requires_grad_() if x.is_floating_point() else x)
            made.sum().backward()
            each, begin = job.micro_batches * (time.perf_counter() - begin), time.perf_counter()
            if optimizer:
                optimizer.step()
            took.append(each + time.perf_counter() - begin)
        found.append(min(took))
        x = made.detach()
    return found


def one_forward_one_backward(job: Job) -> System:
    return system(job, Schedule1F1B, [job.rank])


def one_forward_one_backward_compiled(job: Job) -> System:
    """The same, every block compiled on its own."""
    return system(job, Schedule1F1B, [job.rank], compiled=True)


def interleaved(job: Job) -> System:
    """Two parts on each rank, in turn."""
    return system(job, ScheduleInterleaved1F1B, [job.rank, job.rank + job.ranks])


def zero_bubble(job: Job) -> System:
    """ZB-H1: one part on each rank, gradients of weights put off."""
    return system(job, ScheduleInterleavedZeroBubble, [job.rank])


def zbv(job: Job) -> System:
    """ZB-V: two parts on each rank, first to last and back, gradients of weights put off."""
    return system(job, ScheduleZBVZeroBubble, [job.rank, 2 * job.ranks - 1 - job.rank])


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Over all samples, or all tokens."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def system(
    job: Job, schedule: Callable[..., Any], numbers: Sequence[int], compiled: bool = False
) -> System:
    """A schedule of torch.

    Args:
        job: a model of blocks or a chain, whose loss is the mean cross-entropy over all samples or tokens.
        schedule: its class.
        numbers: the parts of this rank; all ranks have as many.
        compiled: whether blocks are compiled.
    """
    parts = job.ranks * len(numbers)
    part, batch = parts_of(job, parts), job.work.batch()
    modules = [part(number) for number in numbers]
    for module in modules if compiled else ():
        for block in getattr(module, "blocks", [module]):
            block.compile()
    stages = [
        PipelineStage(module, number, parts, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    made = schedule(
        stages[0] if schedule is Schedule1F1B else stages, job.micro_batches, loss_fn=mean_loss
    )
    optimizer = job.work.optimizer(p for module in modules for p in module.parameters())
    first, last = 0 in numbers, parts - 1 in numbers

    def step() -> float:
        losses: list[Tensor] = []
        inputs = (batch["x"],) if first else ()
        made.step(*inputs, **({"target": batch["y"], "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(total)
        return float(total)

    return System(step)
