"""Plain PyTorch on one device: eager, compiled, and as the reference of the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.systems.system import Job, Loss, System, train
from benchmarks.works.work import Batch


def eager(job: Job) -> System:
    module, batch = Loss(job.work.model(), job.work), job.work.batch()
    optimizer = job.work.optimizer(module.parameters())
    return System(lambda: train(module, optimizer, batch).item())


def compiled(job: Job) -> System:
    module, batch = Loss(job.work.model(), job.work), job.work.batch()
    optimizer = job.work.optimizer(module.parameters())
    fast: Any = torch.compile(module)
    return System(lambda: train(fast, optimizer, batch).item())


def in_parts(job: Job, parts: int) -> System:
    """One device that trains as `parts` ranks of DDP do: each part with its own statistics."""
    module, whole = Loss(job.work.model(), job.work), job.work.batch()
    optimizer = job.work.optimizer(module.parameters())
    batches = [
        {name: leaf.chunk(parts)[number] for name, leaf in whole.items()} for number in range(parts)
    ]

    def step() -> float:
        optimizer.zero_grad()
        losses = [backward(module, batch, parts) for batch in batches]
        optimizer.step()
        return sum(losses)

    return System(step)


def backward(module: nn.Module, batch: Batch, parts: int) -> float:
    loss = module(batch) / parts
    loss.backward()
    return float(loss.detach())
