"""DTensor: tensor parallel as PyTorch's tutorial has it and tuned, and tables split by rows.

Tuned means: sequence parallel norms, embeddings and sums; one gather for query, key and value; the
head split by classes under `loss_parallel`; fused optimizers. As in torchtitan, everything between
the split layers works on local tensors, and blocks are compiled one by one.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.systems.system import Job, System
from benchmarks.works.work import Batch, Work
from examples.models.wide_deep import WideDeep

Plan = dict[str, ParallelStyle]


def eager(job: Job) -> System:
    """As in the tutorial, with the head split by classes; tables split by rows, all else as on one device."""
    return system(job, tune=False, compiled=False)


def compiled(job: Job) -> System:
    """The same, every block compiled on its own; without blocks, the whole model."""
    return system(job, tune=False, compiled=True)


def tuned(job: Job) -> System:
    """With positions split between the layers; with tables, the rest of the model data parallel."""
    return system(job, tune=True, compiled=False)


def tuned_compiled(job: Job) -> System:
    """The same, every block compiled on its own; without blocks, the whole model."""
    return system(job, tune=True, compiled=True)


class Sliced(SequenceParallel):
    """A module with whole parameters that gets a whole input and computes this rank's part of it."""

    @staticmethod
    def _prepare_input_fn(placements: Any, _: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
        whole = DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False)
        return whole.redistribute(placements=placements)


def plain_plan(work: Work, model: nn.Module) -> Plan:
    """The tutorial's: pairs of layers split by columns and by rows, whole activations between them."""
    columns = dict.fromkeys(work.columns, ColwiseParallel())
    return {
        **columns,
        **dict.fromkeys(work.rows, RowwiseParallel()),
        **head_plan(model, Replicate()),
    }


def head_plan(model: nn.Module, features: Any) -> Plan:
    """The last layer split by classes, if the model has a `head`; its logits stay split."""
    if not hasattr(model, "head"):
        return {}
    split = ColwiseParallel(
        input_layouts=features, output_layouts=Shard(-1), use_local_output=False
    )
    return {"head": split}


def sequence_plan(work: Work, model: nn.Module) -> Plan:
    """Activations split by positions between the pairs, for a GPT, BERT or Llama of `benchmarks.works`."""
    split = SequenceParallel(use_local_output=True)
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    gathered_first = PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    # BERT's attention gets a mask as well, Llama's a rotation.
    two_inputs = hasattr(model, "transform") or not hasattr(model, "position")
    embedding = (
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        if "token.weight" in work.tables
        else Sliced(use_local_output=True)
    )
    positions: Plan = {}
    if hasattr(model, "position"):
        positions["position"] = Sliced(sequence_dim=0, use_local_output=True)
    names = ("norm", "first_norm", "transform")
    return {
        "token": embedding,
        **{name: split for name in names if hasattr(model, name)},
        **positions,
        **dict.fromkeys(("blocks.*.norm1", "blocks.*.norm2"), split),
        "blocks.*.attention": gathered_first if two_inputs else gathered,
        "blocks.*.feed": gathered,
        **dict.fromkeys(work.columns, ColwiseParallel()),
        **dict.fromkeys(work.rows, RowwiseParallel(output_layouts=Shard(1))),
        **head_plan(model, Shard(1)),
    }


def table_plan(spread: bool) -> Plan:
    """The embedding tables of a Wide&Deep split by rows.

    Args:
        spread: whether each rank goes on with its part of the batch, rather than with all of it.
    """
    out = Shard(0) if spread else Replicate()
    split = RowwiseParallel(input_layouts=Replicate(), output_layouts=out)
    return {"wide": split, "deep": split}


def summed(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """A hook of DDP that adds gradients up: the loss already counts only this rank's part."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


# DDP reads the hook's annotations, and does not take them as text.
summed.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


def data_parallel(part: nn.Module) -> DistributedDataParallel:
    """A part of the model that each rank runs on its part of the batch."""
    made = DistributedDataParallel(part, gradient_as_bucket_view=True)
    made.register_comm_hook(None, summed)
    return made


def laid_out(job: Job, mesh: DeviceMesh, tune: bool) -> tuple[nn.Module, Batch, float]:
    """The model split, the batch as this rank gets it, and which part of the loss is its own."""
    work, own = job.work, 1.0
    model: Any = work.model()
    batch, part = work.batch(), job.part()
    if isinstance(model, WideDeep):
        plan = table_plan(spread=tune)
        if tune:
            model.layers, own = data_parallel(model.layers), 1 / job.ranks  # type: ignore[assignment]
            batch = {**part, "ids": batch["ids"]}
    elif hasattr(model, "backbone") and tune:
        plan = head_plan(model, Shard(0))
        model.backbone = data_parallel(model.backbone)
        batch = {**batch, "x": part["x"]}
    else:
        between = tune and hasattr(model, "blocks")
        plan = sequence_plan(work, model) if between else plain_plan(work, model)
    return parallelize_module(model, mesh, plan), batch, own


class LocalUpdate:
    """A fused optimizer on the local tensors of DTensors: less to dispatch, and any fused kernel.

    Gradients of whole parameters that are still sums over ranks, such as those of norms that saw a
    part of the positions, are added up together.
    """

    def __init__(self, work: Work, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._own = [nn.Parameter(local(each.detach())) for each in self._parameters]
        self._optimizer = work.optimizer(self._own)

    def step(self) -> None:
        self._add_up()
        for own, parameter in zip(self._own, self._parameters, strict=True):
            own.grad, parameter.grad = local(parameter.grad), None
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _add_up(self) -> None:
        """One all-reduce for all gradients that need it; the rest gets the layout of its parameter."""
        parts: list[Tensor] = []
        for parameter in self._parameters:
            grad: Any = parameter.grad
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
                if grad.placements[0].is_partial() and parameter.placements[0].is_replicate():
                    parts.append(grad.to_local())
                elif grad.placements != parameter.placements:
                    parameter.grad = grad.redistribute(placements=parameter.placements)
        if parts:
            flat = torch.cat([part.view(-1) for part in parts])
            dist.all_reduce(flat)
            sizes = [part.numel() for part in parts]
            for part, total in zip(parts, flat.split(sizes), strict=True):
                part.copy_(total.view_as(part))


def local(tensor: Any) -> Tensor:
    """What this rank has of a tensor, in the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def system(job: Job, tune: bool, compiled: bool) -> System:
    mesh = init_device_mesh("cpu", (job.ranks,))
    model, batch, own = laid_out(job, mesh, tune)
    update = LocalUpdate(job.work, model)
    if compiled:  # blocks, where there are any: they are alike
        for part in job.work.blocks(model) or [model]:
            part.compile()
    splits_loss = hasattr(model, "head")

    def step() -> float:
        with loss_parallel() if splits_loss else nullcontext():
            loss = job.work.loss_fn(model, batch) * own
            loss.backward()
        update.step()
        whole = local(loss.detach())
        if own < 1:
            dist.all_reduce(whole)
        return float(whole)

    return System(step)
