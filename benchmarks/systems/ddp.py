"""DistributedDataParallel, eager and compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.systems.synced import synced
from benchmarks.systems.system import Job, Loss, System, mean, train


def eager(job: Job) -> System:
    """With gradients that are views of the buckets, a graph that is said to stay the same, and small buckets.

    Of 1 + 25 (the default), 5 and 50 MiB, 5 was the fastest for `gpt`: by 4 % on one host, by 8 % at 1 Gbit/s
    (2026-11-21). For other works it was not tuned.
    """
    return as_it_is(job, job.work.model())


def with_synced_norms(job: Job) -> System:
    """The same with BatchNorms over the batches of all ranks: what a single device trains, and weft."""
    return as_it_is(job, synced(job.work.model()))


def as_it_is(job: Job, model: nn.Module) -> System:
    module = DistributedDataParallel(
        Loss(model, job.work),
        gradient_as_bucket_view=True,
        static_graph=True,
        bucket_cap_mb=5,
    )
    return system(job, module, module)


def compiled(job: Job) -> System:
    """The graph is cut where a bucket is full, so that buckets are reduced beside the backward."""
    module = DistributedDataParallel(Loss(job.work.model(), job.work), gradient_as_bucket_view=True)
    fast: Any = torch.compile(module)
    return system(job, module, fast)


def system(job: Job, module: nn.Module, stepped: nn.Module) -> System:
    optimizer, batch = job.work.optimizer(module.parameters()), job.part()
    return System(lambda: mean(train(stepped, optimizer, batch)))
