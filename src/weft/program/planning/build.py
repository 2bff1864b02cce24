"""From a captured step to executors: the parts that `compile`, `evaluation` and `full_state_dict` share."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from weft.capture import Captured, capture
from weft.capture.optimizer_groups import Optimizers
from weft.capture.python_guards import Guard
from weft.compiler.context import Options
from weft.compiler.hints import Hints
from weft.compiler.memory.order import moments
from weft.compiler.memory.order_constraints import order_constraints
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.plans.specialize import Target, outline, specialize, with_cuda_graphs
from weft.compiler.strategy_hints import batch_hints, with_leaves
from weft.errors import LayoutError, UserError
from weft.hardware import default_device
from weft.ir import LogicalGraph
from weft.ir.logical import Call, Input, Output, Update
from weft.ir.nodes import MASTER, VARIABLE_ROLES
from weft.ir.plan import RankPlan
from weft.layout import SBP, Broadcast, Layout, Placement, Shares, Split
from weft.program.agreement import differences, gathered, run_on_all
from weft.program.data.feed import WholeBatch, layouts_of_shards, layouts_on
from weft.program.live.ownership import LiveShardings
from weft.program.setting import ProgramSetting
from weft.runtime.channels.channel import Channel
from weft.runtime.compiled.choice import UNCOMPILED
from weft.runtime.devices.backend import backend_of
from weft.runtime.devices.cuda_graphs import GraphRunner, capture_obstacle, graph_mode
from weft.runtime.executor.device_executor import DeviceExecutor
from weft.runtime.executor.rank_executor import RankExecutor
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.executor.work import Rank
from weft.runtime.kernels.dense_operands import onednn_is_faster
from weft.runtime.memory.state import local_part
from weft.runtime.world.world import World
from weft.strategy.precision import Precision


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
    setting: ProgramSetting,
    constants: Mapping[str, Tensor],
    compiled: Compiled,
    optimizers: Optimizers,
) -> dict[int, RankExecutor]:
    """Executors for the ranks of this process, after all ranks have agreed that they compiled the same.

    Raises:
        UserError, RankFailure: on every process, when one of them cannot start.
    """
    world = setting.world
    check_same_program(world, compiled)
    channels = world.connect(compiled.plan.communicators)
    executors: dict[int, RankExecutor] = {}

    def start() -> None:
        for plan in compiled.plan.ranks:
            own = channels[plan.rank]
            executors[plan.rank] = _executor(setting, constants, compiled, plan, own, optimizers)

    try:
        run_on_all(world, "the start of the ranks", start)
    except BaseException:
        close_all(executors)
        raise
    return executors


def close_all(executors: Mapping[int, RankExecutor]) -> None:
    """End the threads of a plan, and close its channels."""
    for executor in executors.values():
        executor.close()


def _executor(
    setting: ProgramSetting,
    constants: Mapping[str, Tensor],
    compiled: Compiled,
    plan: RankPlan,
    channels: Mapping[int, Channel],
    optimizers: Optimizers,
) -> RankExecutor:
    world = setting.world
    device = world.device(plan.rank)
    layouts = layouts_on(compiled.graph, plan.rank, "constant")
    own = {
        key: local_part(constants[key], layout, plan.rank).detach().to(device)
        for key, layout in layouts.items()
    }
    if setting.kernels not in UNCOMPILED:
        plan = outline(plan)
    streams, replayer = backend_of(device).streams, None
    order = compiled.schedule.moments(plan.rank) or tuple(moments(plan))
    waits = order_constraints(plan, order) if streams is None else ()
    if streams is not None:
        replayer = make_graph_runner(setting, compiled, plan, device)
        plan = plan if replayer is None else replayer.plan
    if setting.options.own_kernels:
        plan = specialize(plan, Target(device.type, onednn_is_faster()))
    variables = setting.variables[plan.rank].with_constants(own)
    rank = Rank(
        *(plan, device, channels, variables, optimizers, setting.seed),
        kernels=setting.kernels,
        replayer=replayer,
    )
    # Kernels compiled and measured on the way run on the current device.
    with backend_of(device).current(device):
        if streams is None:
            return ThreadExecutor(rank, timeout=world.timeout, turns=waits)
        timed = compiled.schedule.simulation is not None
        acts = compiled.schedule.timeline(plan.rank) if timed else ()
        simulated = [(act.actor, act.micro) for act in acts] if timed else None
        return DeviceExecutor(rank, streams, timeout=world.timeout, order=simulated)


def make_graph_runner(
    setting: ProgramSetting, compiled: Compiled, plan: RankPlan, device: torch.device
) -> GraphRunner | None:
    """The replayer of segments as CUDA graphs; None on other devices, and where ranks share a process."""
    # Only one thread of a process may capture at a time, and none may wait for the device then.
    make_tape = backend_of(device).tape
    if make_tape is None or len(setting.world.ranks) > 1:
        return None
    (program,) = (each for each in compiled.programs if each.rank == plan.rank)
    marked, found = with_cuda_graphs(
        plan, program, default_device(device.type), graph_mode(), capture_obstacle
    )
    return GraphRunner(marked, found, make_tape(device), device, setting.seed)


def evaluation(
    setting: ProgramSetting,
    trained: Compiled,
    function: Callable[[nn.Module, Any], Any],
    batch: Any,
    like: Captured | None = None,
    changing: Sequence[Guard] = (),
) -> tuple[Captured, Compiled]:
    """A step without updates that reads the variables of `trained` as they are laid out; `like` one for other shapes.

    Numbers in the places `changing` are inputs, where they can be.
    """
    device_type = setting.placement.device_type
    precision = setting.options.precision or Precision()
    # Parameters that are in pieces, and are used so.
    apart = frozenset(
        node.key
        for node in trained.graph.of_kind(Input)
        if node.role == "parameter" and node.key not in trained.stored
        if node.value.layout and any(isinstance(sbp, Split) for sbp in node.value.layout.sbp)
    )
    captured = capture(
        setting.model,
        function,
        None,
        WholeBatch(batch).nest,
        device_type,
        training=False,
        precision=precision.compute,
        apart=apart,
        parameters=precision.parameters,
        like=like,
        changing=changing,
        constants=like.batch.constants if like else None,
    )
    return captured, compiled_like(setting, trained, captured.graph, layouts_of_shards(batch))


def compiled_like(
    setting: ProgramSetting,
    trained: Compiled,
    graph: LogicalGraph,
    leaves: Mapping[str, Layout] | None = None,
    clipped: bool = False,
    others: Iterable[Input] = (),
) -> Compiled:
    """`graph` on the stages of a training step, with its variables, and leaves of its batch, as they are laid out.

    `clipped`: gradients are clipped and measured as in that step. `others`: variables that an earlier step laid.
    """
    old = setting.options
    options = Options(old.cost_model, stages=old.stages, own_kernels=old.own_kernels)
    if clipped:
        options = replace(options, clip_norm=old.clip_norm, metrics=old.metrics)
    read = {node.key for node in graph.of_kind(Input)}
    hints = with_leaves(as_they_lie(trained, read, others), leaves or {})
    hints = batch_hints(setting.strategy, graph, hints)
    stages = trained.stages
    ranks = tuple(setting.variables)
    masters = {f"{key}.{MASTER}": stage for key, stage in stages.homes.items()}
    homes = {**stages.homes, **masters}
    return compile_graph(graph, hints, setting.placement, ranks, options, homes)


def with_lying(
    hints: Mapping[int, Hints], held: LiveShardings, graph: LogicalGraph
) -> dict[int, Hints]:
    """Hints that fix what open programs hold, too, to how it is laid out, where nothing else is said of it."""
    shares = _with_states(held.shares, graph) if held.layouts else None
    parameters = {node.key for node in graph.of_kind(Input) if node.role == "parameter"}
    found = {}
    for axes, own in hints.items():
        lying = {k: x.sbp for k, x in held.layouts.items() if x.placement.axes == axes}
        # A tensor that is whole may be read in parts.
        whole = {
            key
            for key, sbps in own.inputs.items()
            if lying.get(key) == (Broadcast(),) * axes and any(isinstance(x, Split) for x in sbps)
        }
        found[axes] = replace(
            own,
            inputs={**lying, **own.inputs},
            stored={**held.stored, **own.stored},
            shares=shares,
            whole=frozenset(whole & parameters),
        )
    return found


def _with_states(shares: Mapping[str, Shares], graph: LogicalGraph) -> dict[str, Shares]:
    """Shares of variables, and of FP32 main parameters and states, whose elements are updated with those of their
    parameter.
    """
    found = {**shares, **{f"{key}.{MASTER}": each for key, each in shares.items()}}
    inputs = {node.value.name: node for node in graph.of_kind(Input)}
    for update in graph.of_kind(Update):
        target = inputs[update.target.name]
        if target.key in shares:
            states = (inputs[ref.name] for ref in update.states)
            alike = (node for node in states if node.value.shape == target.value.shape)
            found |= {node.key: shares[target.key] for node in alike}
    return found


def as_they_lie(
    trained: Compiled, keys: Collection[str], others: Iterable[Input] = ()
) -> dict[int, Hints]:
    """Hints that fix variables to their layouts, by the number of axes of their placements."""
    every = [*others, *trained.graph.of_kind(Input)]
    found: dict[int, dict[str, tuple[SBP | None, ...]]]
    found = {placement.axes: {} for placement in trained.stages.placements}
    for node in every:
        if node.key in keys and node.role in VARIABLE_ROLES and node.value.layout is not None:
            found[node.value.layout.placement.axes][node.key] = node.value.layout.sbp
    shares = {node.key: node.shares for node in every if node.shares is not None}
    return {axes: Hints(inputs, trained.stored, shares) for axes, inputs in found.items()}


_BATCH = "the batch "
_SAME_ROWS = 'give batches of the same shapes and dtypes, with batch="local" as many rows'
# The value compared, and its place in the user's code.
_Line: TypeAlias = tuple[str, str]


def check_same_program(world: World, compiled: Compiled) -> None:
    """Check that all processes have compiled the same program. Every process must call it.

    Raises:
        UserError: on all, names the first node in which two of them differ.
    """
    if not world.several:
        return
    if len({*gathered(world, "the program", lambda: compiled.fingerprint)}) == 1:
        return
    own = json.dumps([list(_words(compiled.graph)), list(_layouts(compiled.graph))])
    for rank, first, other in differences(gathered(world, "nodes and layouts", lambda: own)):
        for kind, one, two in zip(("the step has", "it is laid out as"), first, other, strict=True):
            _check_lines(kind, one, two, rank)
    raise UserError(
        "the ranks compile different programs, of the same step in the same layouts; every process must run the same "
        "versions of weft and torch, with the same variables of the environment"
    )


def _check_lines(kind: str, first: Sequence[_Line], other: Sequence[_Line], rank: int) -> None:
    for (one, here), (two, there) in zip_longest(first, other, fillvalue=("nothing more", "")):
        if one != two:
            of_batch = one.startswith(_BATCH) and two.startswith(_BATCH)
            must = _SAME_ROWS if of_batch else "compile the same model, loss function and optimizer"
            raise UserError(
                f"the ranks compile different programs: where {kind} {one}{here} on rank 0, {kind} {two}{there} on "
                f"rank {rank}; every process must {must}"
            )


def _words(graph: LogicalGraph) -> Iterator[_Line]:
    """The nodes of a graph in words, but for their layouts."""
    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    for node in graph.nodes:
        match node:
            case Input(value=value):
                yield f"the {node.role} {node.key} {value.dtype}{list(value.shape)}", ""
            case Call(hint=None):
                made = ", ".join(f"{value.dtype}{list(value.shape)}" for value in node.makes)
                given = (*node.args, *(value for _, value in node.kwargs))
                numbers = ", ".join(repr(arg) for arg in given if _is_plain(arg))
                text = f" with {numbers}" if numbers else ""
                yield f"{node.op}{text} -> {made}", f" at {node.location}"
            case Update():
                what = f"{node.rule} of {keys[node.target.name]} in group {node.group}"
                yield f"an update by {what}", ""
            case Output():
                yield f"the result {node.key}", ""


def _is_plain(arg: object) -> bool:
    return isinstance(arg, bool | int | float | str) or (
        isinstance(arg, tuple) and all(map(_is_plain, arg))
    )


def _layouts(graph: LogicalGraph) -> Iterator[_Line]:
    for node in graph.of_kind(Input):
        yield f"{node.key} {node.value.layout}", ""
    for node in graph.of_kind(Call):
        yield (
            f"{node.op} {', '.join(str(each.layout) for each in node.makes)}",
            f" at {node.location}",
        )
