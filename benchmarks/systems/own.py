"""weft: the single-device program, a placement and a strategy."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import weft
from benchmarks.systems.system import Job, System
from weft.hardware import default_device
from weft.hardware.measured_costs import MeasuredCosts
from weft.program.inspect.inspection import predicted
from weft.program.profiling.profiler import measured_costs
from weft.runtime.compiled.choice import Kernels
from weft.runtime.world.distributed import TRANSPORT

DATA = {"*": weft.split(0)}


def aten(job: Job) -> System:
    """Segments as calls of PyTorch's ops, and of kernels of weft's own."""
    return system(job, "aten")


def auto(job: Job) -> System:
    """For each part of a segment what was measured to be faster, PyTorch's ops or Inductor."""
    return system(job, "auto")


def torch_kernels(job: Job) -> System:
    """Segments as calls of PyTorch's ops alone: what is gained over peers is not of kernels."""
    return system(job, "torch")


def gloo(job: Job) -> System:
    """The same as `aten`, over the transport that the peers have: ranks of one host share no memory."""
    os.environ[TRANSPORT] = "gloo"
    return system(job, "aten")


def system(job: Job, kernels: Kernels) -> System:
    model, batch = job.work.model(), job.work.batch()
    optimizer = job.work.optimizer(model.parameters())
    program = weft.compile(
        model,
        job.work.loss_fn,
        optimizer,
        batch,
        placement=weft.placement("cpu", range(job.ranks)),
        strategy=strategy(job),
        kernels=kernels,
    )

    def peak() -> int:
        measured = program.memory()[job.rank].measured
        assert measured is not None
        return measured.peak

    return System(
        lambda: float(program.step(batch)), peak, program.close, lambda: prediction(program, batch)
    )


def prediction(program: weft.Program, batch: Any) -> dict[str, Any]:
    """Seconds, their interval, bytes and guesses of a program's next steps."""
    world, variant = program._core.setting.world, program._core.variants.current
    found = measured_costs(world, [variant.compiled], program._core.step.optimizers)
    costs = MeasuredCosts(found, default_device(world.device_type))
    simulation = predicted(variant.captured.graph, variant.compiled, costs)
    assert simulation.memory is not None  # the plans say it
    low, high = simulation.interval or (simulation.step_seconds, simulation.step_seconds)
    return {
        "seconds": simulation.step_seconds,
        "low": low,
        "high": high,
        "peak": simulation.memory.planned,
        "planned_sent": simulation.sent_bytes,
        "sent": sent_in_a_step(program, batch),
        "estimates": list(simulation.estimates),
    }


def sent_in_a_step(program: weft.Program, batch: Any) -> int:
    """Bytes that the channels of this process count in a step."""
    executors = program._core.executors.values()
    channels = [channel for each in executors for channel in each._rank.channels.values()]
    before = sum(channel.sent.total() for channel in channels)
    program.step(batch)
    return sum(channel.sent.total() for channel in channels) - before


def strategy(job: Job) -> weft.Strategy:
    if job.strategy == "zero3":
        return weft.Strategy(batch=DATA, zero=weft.Zero(level=3))
    if job.strategy == "tensor_parallel":
        return tensor_parallel(job)
    if job.strategy == "pipeline":
        return weft.Strategy(stages=job.ranks, micro_batches=job.micro_batches)
    if job.strategy == "split":
        tables = {pattern: weft.split(0) for pattern in job.work.tables}
        return weft.Strategy(batch=DATA, parameters={**tables, "*": weft.broadcast})
    if job.strategy == "expert":
        # What is no expert is stored in shards too.
        experts = weft.expert_parallel(job.work.experts, capacity=job.work.capacity)
        return replace(experts, zero=weft.Zero(level=1))
    return weft.data_parallel()


def tensor_parallel(job: Job) -> weft.Strategy:
    """Linear layers and vocabularies split, positions split between them."""
    layers = weft.tensor_parallel(job.work.columns, job.work.rows, sequence=1)
    tables = {pattern: weft.split(0) for pattern in job.work.tables}
    return weft.Strategy(
        batch=layers.batch,
        parameters={**layers.parameters, **tables},
        activations=layers.activations,
    )
