"""FSDP2, eager and compiled: every block gathered for its forward and again for its backward."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    for each in blocks:
        fully_shard(each, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh)
    optimizer, batch = job.work.optimizer(module.parameters()), job.part()
    return System(lambda: mean(train(module, optimizer, batch)))
