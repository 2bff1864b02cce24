"""From a captured step to executors: the parts that `compile`, `evaluation` and `full_state_dict` share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture import Captured, capture
from weft.compiler.deduce import Hints
from weft.compiler.options import Options
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.precision import Precision
from weft.compiler.replays import replays
from weft.errors import LayoutError
from weft.hardware import usual_device
from weft.ir import LogicalGraph
from weft.ir.logical import Input, Output, Ref, Value
from weft.ir.nodes import MASTER, VARIABLE_ROLES, Role
from weft.ir.plan import RankPlan
from weft.layout import SBP, Layout, Placement, Split
from weft.program.local_batch import LocalBatch
from weft.program.shards import layouts_of_shards, layouts_on, local_part, without_shards
from weft.runtime.cuda_graphs import CudaTape, graph_mode
from weft.runtime.device_executor import DeviceExecutor
from weft.runtime.executor import Executor
from weft.runtime.kernel_choice import Kernels
from weft.runtime.replay import Replayer, obstacle
from weft.runtime.state import Variables
from weft.runtime.world import World


@dataclass(frozen=True)
class Setting:
    """What all programs of one model share.

    Attributes:
        model: the user's model; never changed.
        world: the ranks of this process.
        placement: all ranks.
        options: what the training step was compiled with.
        variables: the variables of each rank of this process that is in the placement.
        seed: of the random ops.
        kernels: how segments run.
        local: makes whole batches of what each process brings; None where each brings all.
    """

    model: nn.Module
    world: World
    placement: Placement
    options: Options
    variables: Mapping[int, Variables]
    seed: int
    kernels: Kernels = "aten"
    local: LocalBatch | None = None

    @property
    def several(self) -> bool:
        """Whether other processes take part, which must be given the same."""
        return self.world.size > len(self.world.ranks)

    def run(self, function: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Call `function(rank)` on all ranks of this process that take part; the result of the first."""
        results = self.world.run(lambda rank: function(rank) if rank in self.variables else None)
        return next(result for result in results if result is not None)


def local_ranks(world: World, placement: Placement) -> tuple[int, ...]:
    """The ranks of this process that are in the placement.

    Raises:
        LayoutError: when the placement does not fit the world, or leaves this process without work.
    """
    world.check(placement)
    ranks = tuple(rank for rank in world.ranks if rank in placement.coordinates)
    if not ranks:
        raise LayoutError(
            f"rank {world.ranks[0]} is not in the placement {placement}; every process of the world "
            f"(ranks 0 to {world.size - 1}) must have work: start {len(placement.ranks)} processes"
        )
    return ranks


def build(
    setting: Setting,
    constants: Mapping[str, Tensor],
    compiled: Compiled,
    optimizer: torch.optim.Optimizer | None,
) -> dict[int, Executor | DeviceExecutor]:
    """Executors for the ranks of this process, after all ranks have agreed that they compiled the same."""
    world = setting.world
    world.check_same(dict.fromkeys(world.ranks, compiled.fingerprint), "the compiled program")
    channels = world.connect(compiled.plan.communicators)
    executors: dict[int, Executor | DeviceExecutor] = {}
    for plan in compiled.plan.ranks:
        device = world.device(plan.rank)
        layouts = layouts_on(compiled.graph, plan.rank, "constant")
        own = {
            key: local_part(constants[key], layout, plan.rank).to(device)
            for key, layout in layouts.items()
        }
        make = _on_streams(setting, compiled, plan, device) if has_streams(device) else Executor
        # What is compiled and measured on the way runs on the current device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            executors[plan.rank] = make(
                plan,
                channels[plan.rank],
                device,
                setting.variables[plan.rank].with_constants(own),
                optimizer=optimizer,
                seed=setting.seed,
                timeout=world.timeout,
                kernels=setting.kernels,
            )
    return executors


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is put on streams and goes on by itself."""
    return device.type == "cuda"


def _on_streams(
    setting: Setting, compiled: Compiled, plan: RankPlan, device: torch.device
) -> Callable[..., DeviceExecutor]:
    """An executor that runs the acts of a step as they were rehearsed."""
    replayer = make_replayer(setting, compiled, plan, device)
    make = partial(DeviceExecutor, replayer=replayer)
    rehearsal = compiled.schedule.rehearsal
    if rehearsal is None:
        return make
    return partial(make, order=[(a.actor, a.micro) for a in compiled.schedule.timeline(plan.rank)])


def make_replayer(
    setting: Setting, compiled: Compiled, plan: RankPlan, device: torch.device
) -> Replayer | None:
    """What replays segments as CUDA graphs; None on other devices, and where ranks share a process."""
    # Only one thread of a process may capture at a time, and none may wait for the device then.
    if device.type != "cuda" or len(setting.world.ranks) > 1:
        return None
    (program,) = (each for each in compiled.programs if each.rank == plan.rank)
    chosen = replays(plan, program, usual_device(device.type), graph_mode(), obstacle)
    return Replayer(plan, chosen, CudaTape(device), device, setting.seed)


def evaluation(
    setting: Setting, trained: Compiled, function: Callable[[nn.Module, Any], Any], batch: Any
) -> tuple[Captured, Compiled]:
    """A step without updates that reads the variables of `trained` as they lie."""
    device_type = setting.placement.device_type
    precision = setting.options.precision or Precision()
    whole, _ = without_shards(batch)
    captured = capture(
        setting.model,
        function,
        None,
        whole,
        device_type,
        training=False,
        precision=precision.compute,
        apart=_in_pieces(trained),
        parameters=precision.parameters,
    )
    return captured, _compiled(setting, trained, captured.graph, layouts_of_shards(batch))


def _in_pieces(trained: Compiled) -> frozenset[str]:
    """The names of parameters that lie in pieces, and are used so."""
    return frozenset(
        node.key
        for node in trained.graph.of_kind(Input)
        if node.role == "parameter" and node.key not in trained.stored
        if node.value.layout and any(isinstance(sbp, Split) for sbp in node.value.layout.sbp)
    )


def gathering(setting: Setting, trained: Compiled, masters: bool = False) -> Compiled:
    """A step that returns all parameters and buffers of `trained` whole, or their masters in place of them."""
    every = trained.graph.of_kind(Input)
    of_key = {node.key: node for node in every if masters and _is_master(node)}
    inputs = [
        of_key.get(f"{node.key}.{MASTER}", node)
        for node in every
        if node.role in ("parameter", "buffer")
    ]
    # Who only reads a master may take it for a parameter.
    values = [Value(n.value.name, n.value.shape, n.value.dtype) for n in inputs]
    roles: list[Role] = ["parameter" if n.role == "state" else n.role for n in inputs]
    bare = [Input(v, r, n.key) for v, r, n in zip(values, roles, inputs, strict=True)]
    outputs = [Output(Ref(n.value.name), n.key.removesuffix(f".{MASTER}")) for n in inputs]
    gather = LogicalGraph("full state", (*bare, *outputs))
    return _compiled(setting, trained, gather)


def _is_master(node: Input) -> bool:
    return node.role == "state" and node.key.endswith(f".{MASTER}")


def _compiled(
    setting: Setting,
    trained: Compiled,
    graph: LogicalGraph,
    leaves: Mapping[str, Layout] | None = None,
) -> Compiled:
    """`graph` on the stages of a training step, reading its variables, and leaves of its batch, as they lie."""
    options = Options(cost_model=setting.options.cost_model, stages=setting.options.stages)
    read = {node.key for node in graph.of_kind(Input)}
    hints = with_leaves(as_they_lie(trained, read), leaves or {})
    stages = trained.stages
    ranks = tuple(setting.variables)
    masters = {f"{key}.{MASTER}": stage for key, stage in stages.homes.items()}
    homes = {**stages.homes, **masters}
    return compile_graph(graph, hints, setting.placement, ranks, options, homes)


def with_leaves(hints: Mapping[int, Hints], leaves: Mapping[str, Layout]) -> dict[int, Hints]:
    """Hints that fix leaves of the batch to how they lie, too, where nothing else is said of them."""
    return {
        axes: replace(
            own,
            inputs={
                **{
                    key: layout.sbp
                    for key, layout in leaves.items()
                    if layout.placement.axes == axes
                },
                **own.inputs,
            },
        )
        for axes, own in hints.items()
    }


def with_variables(hints: Mapping[int, Hints], trained: Compiled) -> dict[int, Hints]:
    """Hints that fix parameters and buffers, too, to how they lie, where nothing else is said of them.

    What is stored in shards is left out: its shape alone decides how.
    """
    keys = {
        node.key
        for node in trained.graph.of_kind(Input)
        if node.role in ("parameter", "buffer") and node.key not in trained.stored
    }
    lying = as_they_lie(trained, keys)
    return {
        axes: replace(own, inputs={**lying[axes].inputs, **own.inputs})
        for axes, own in hints.items()
    }


def as_they_lie(trained: Compiled, keys: Collection[str]) -> dict[int, Hints]:
    """Hints that fix variables to their layouts, by the number of axes of their placements."""
    found: dict[int, dict[str, tuple[SBP | None, ...]]]
    found = {placement.axes: {} for placement in trained.stages.placements}
    for node in trained.graph.of_kind(Input):
        if node.key in keys and node.role in VARIABLE_ROLES and node.value.layout is not None:
            found[node.value.layout.placement.axes][node.key] = node.value.layout.sbp
    return {axes: Hints(inputs, trained.stored) for axes, inputs in found.items()}
