"""FSDP2, eager and compiled: every block gathered for its forward and again for its backward.

Gathers are asked for one block ahead and do not hold the thread back: on a CPU there are no streams,
so that without both settings a gather would run beside nothing. In the backward FSDP2 gathers ahead by
itself.
"""

from __future__ import annotations

from itertools import pairwise

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.systems.system import Job, Loss, System, mean, train


def eager(job: Job) -> System:
    return system(job, compile_blocks=False)


def compiled(job: Job) -> System:
    """Every block compiled on its own, as torchtitan does it; without blocks, the whole."""
    return system(job, compile_blocks=True)


def system(job: Job, compile_blocks: bool) -> System:
    module = Loss(job.work.model(), job.work)
    mesh = init_device_mesh("cpu", (job.ranks,))
    blocks = job.work.blocks(module.model)
    if compile_blocks:
        for each in blocks or [module]:
            each.compile()
    sharded = [fully_shard(each, mesh=mesh, reshard_after_forward=True) for each in blocks]
    gather_ahead([fully_shard(module, mesh=mesh), *sharded])
    optimizer, batch = job.work.optimizer(module.parameters()), job.part()
    return System(lambda: mean(train(module, optimizer, batch)))


def gather_ahead(modules: list[FSDPModule]) -> None:
    """Gather each module's parameters while the one before it computes."""
    for before, after in pairwise(modules):
        before.set_modules_to_forward_prefetch([after])
    for each in modules:
        each._set_unshard_async_op(True)
