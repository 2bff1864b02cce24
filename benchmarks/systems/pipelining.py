"""torch.distributed.pipelining: 1F1B, interleaved 1F1B, zero bubble and ZBV, of a GPT cut evenly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        count, rest = divmod(len(model.blocks), parts)
        if rest:
            raise ValueError(f"{len(model.blocks)} blocks cannot be cut into {parts} equal parts")
        self.blocks = model.blocks[number * count : (number + 1) * count]
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


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def system(
    job: Job, schedule: Callable[..., Any], numbers: Sequence[int], compiled: bool = False
) -> System:
    """A schedule of torch.

    Args:
        job: a GPT of `benchmarks.works`, whose loss is the mean over all tokens.
        schedule: its class.
        numbers: the parts of this rank; all ranks have as many.
        compiled: whether blocks are compiled.
    """
    parts = job.ranks * len(numbers)
    model, batch = job.work.model(), job.work.batch()
    modules = [Part(model, number, parts) for number in numbers]
    for block in (block for module in modules for block in module.blocks if compiled):
        block.compile()
    stages = [
        PipelineStage(module, number, parts, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    made = schedule(
        stages[0] if schedule is Schedule1F1B else stages, job.micro_batches, loss_fn=token_loss
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
