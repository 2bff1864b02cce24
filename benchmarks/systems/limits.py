"""The limits of many ranks: the compute of one of them and nothing else, with each system's kernels.

A rank trains on its samples as a single device does; where the strategy splits the optimizer's states, it updates its
part of every parameter. Nothing is communicated, so ranks drift apart and the losses mean nothing. The lowest of the
limits of a pair is what a system is measured against: no kernels that were measured there, weft's own included, do the
same work in less. Which limits a pair has says `benchmarks.pairs`: none is compiled where no peer is (resnet50, slow
links), "limit weft auto" stands beside "weft auto" alone, and strategies that split tables or experts have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import weft
from benchmarks.systems.system import Job, Loss, System, train
from weft.runtime.compiled.choice import Kernels
from weft.runtime.executor.optimizer import OptimizerUpdates


def eager(job: Job) -> System:
    """With PyTorch's kernels, op by op."""
    module = Loss(job.work.model(), job.work)
    return by_autograd(job, module, module)


def compiled(job: Job) -> System:
    """With those of torch.compile."""
    module = Loss(job.work.model(), job.work)
    fast: Any = torch.compile(module)
    return by_autograd(job, module, fast)


def by_autograd(job: Job, module: nn.Module, stepped: nn.Module) -> System:
    """Plain PyTorch; `stepped` is the module as it is called."""
    batch, parameters = job.part(), list(module.parameters())
    if updates_all(job):
        optimizer = job.work.optimizer(parameters)
        return System(lambda: train(stepped, optimizer, batch).item())

    def gradients() -> float:
        loss = stepped(batch)
        loss.backward()
        return float(loss.detach())

    return System(with_split_update(job, parameters, gradients))


def aten(job: Job) -> System:
    """With weft's kernels."""
    return by_weft(job, "aten")


def auto(job: Job) -> System:
    """With weft's, or Inductor's where they were measured to be faster."""
    return by_weft(job, "auto")


def by_weft(job: Job, kernels: Kernels) -> System:
    """One rank of weft, which knows of no others."""
    with ExitStack() as stack:
        stack.enter_context(weft.local_world(1))
        if not updates_all(job):
            stack.enter_context(updates_of_parts(job))
        model, batch = job.work.model(), job.part()
        parameters = list(model.parameters())
        program = weft.compile(
            *(model, job.work.loss_fn, job.work.optimizer(parameters), batch),
            placement=weft.placement("cpu", [0]),
            kernels=kernels,
        )
        stack.callback(program.close)
        kept = stack.pop_all()

    def peak() -> int:
        measured = program.memory()[0].measured
        assert measured is not None
        return measured.peak

    return System(lambda: float(program.step(batch)), peak, kept.close)


@contextmanager
def updates_of_parts(job: Job) -> Iterator[None]:
    """Have updates of weft's programs in this process update this rank's part of every parameter alone.

    Not by `step(update=False)` and an optimizer: that copies every gradient, some 2 % of a step of `gpt`.
    """
    made: dict[OptimizerUpdates, tuple[list[nn.Parameter], Optimizer]] = {}

    def run(self: OptimizerUpdates, sources: Sequence[Tensor]) -> None:
        if self not in made:
            parts = [nn.Parameter(shard(each.detach(), job)) for each in self._shards]
            made[self] = parts, job.work.optimizer(parts)
        parts, optimizer = made[self]
        for part, gradient in zip(parts, self._gradients(sources), strict=True):
            part.grad = shard(gradient, job)
        optimizer.step()
        optimizer.zero_grad()

    with patch.object(OptimizerUpdates, "run", run):
        yield


def updates_all(job: Job) -> bool:
    """True where every rank updates all parameters."""
    return job.strategy == "data_parallel"


def with_split_update(
    job: Job, parameters: list[nn.Parameter], gradients: Callable[[], float]
) -> Callable[[], float]:
    """A step that updates this rank's part of every parameter.

    Args:
        job: of the rank.
        parameters: of the model.
        gradients: fills their `grad`, which is None before; returns the loss.
    """
    shards = [nn.Parameter(shard(each.detach(), job)) for each in parameters]
    optimizer = job.work.optimizer(shards)

    def step() -> float:
        loss = gradients()
        for own, parameter in zip(shards, parameters, strict=True):
            assert parameter.grad is not None
            own.grad, parameter.grad = shard(parameter.grad, job), None
        optimizer.step()
        return loss

    return step


def shard(tensor: Tensor, job: Job) -> Tensor:
    """This rank's part of a tensor's elements, in the tensor's memory."""
    return tensor.view(-1).tensor_split(job.ranks)[job.rank]
