"""Plain PyTorch on one device: eager, compiled, as the reference of the losses, and as the limit of many ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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


def limit(job: Job) -> System:
    """The compute of one rank and nothing else: no communication, so its losses mean nothing.

    The step of a single device on this rank's samples; where the strategy splits the optimizer's
    states, its update of this rank's part of every parameter.
    """
    module, batch = Loss(job.work.model(), job.work), job.part()
    parameters = list(module.parameters())
    if job.strategy == "data_parallel":
        optimizer = job.work.optimizer(parameters)
        return System(lambda: train(module, optimizer, batch).item())
    shards = [nn.Parameter(shard(each.detach(), job)) for each in parameters]
    optimizer = job.work.optimizer(shards)

    def step() -> float:
        module.zero_grad()
        loss = module(batch)
        loss.backward()
        for own, parameter in zip(shards, parameters, strict=True):
            assert parameter.grad is not None
            own.grad = shard(parameter.grad, job)
        optimizer.step()
        return float(loss.detach())

    return System(step)


def shard(tensor: Tensor, job: Job) -> Tensor:
    """This rank's part of a tensor's elements, in the tensor's memory."""
    return tensor.view(-1).tensor_split(job.ranks)[job.rank]
