"""Variables of a program: every rank's part of the model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from weft.compiler.loss_scale import FIRST_VALUES
from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Input, Update, Value
from weft.ir.nodes import MASTER
from weft.ir.plan import Communicator
from weft.layout import Layout
from weft.program.build import Setting
from weft.program.initial import check_initial_values, initial_values
from weft.program.shards import layouts_on, local_part
from weft.runtime.channel import Channel
from weft.runtime.state import Variables
from weft.runtime.world import World


def initial_variables(
    model: nn.Module, graph: LogicalGraph, world: World, ranks: tuple[int, ...]
) -> dict[int, Variables]:
    """Every rank's part of the model's first values; with several processes, of those of the first one.

    One tensor is whole at a time, beside the model's own.
    """
    check_initial_values(model)
    layouts = {rank: variable_layouts(graph, rank) for rank in ranks}
    parts: dict[int, dict[str, Tensor]] = {rank: {} for rank in ranks}
    for key, whole in _agreed(initial_values(model, world.device(ranks[0])), world, ranks):
        for rank in ranks:
            if key in layouts[rank]:
                part = local_part(whole, layouts[rank][key], rank)
                parts[rank][key] = part.to(world.device(rank), copy=True).contiguous()
    return {rank: Variables(own) for rank, own in parts.items()}


def _agreed(
    values: Iterator[tuple[str, Tensor]], world: World, ranks: tuple[int, ...]
) -> Iterator[tuple[str, Tensor]]:
    """The values of the first process, on all of them."""
    with everyone(world) as channel:
        for key, value in values:
            if channel is not None:
                value = channel.broadcast(value.to(world.device(ranks[0])), 0)
            yield key, value


def add_optimizer_states(
    setting: Setting, graph: LogicalGraph, optimizer: torch.optim.Optimizer | None
) -> None:
    """Hand over the states that the user's optimizer already has, as after loading a checkpoint.

    Every process must have loaded the same. A parameter without states starts afresh; states of one
    that the step does not update, as Adagrad makes them, stay with the user's optimizer.

    Raises:
        UserError: naming a state that the optimizer's update does not have, or of another shape.
    """
    if optimizer is None or not optimizer.state:
        return
    keys = {id(parameter): key for key, parameter in setting.model.named_parameters()}
    states = {node.key: node.value for node in graph.of_kind(Input) if node.role == "state"}
    names = {node.value.name: node.key for node in graph.of_kind(Input)}
    updated = {names.get(update.target.name) for update in graph.of_kind(Update)}
    for parameter, entries in optimizer.state.items():
        owner = keys.get(id(parameter))
        for name, whole in entries.items() if owner in updated else ():
            if isinstance(whole, Tensor):
                _add_state(setting, f"{owner}.{name}", whole, states.get(f"{owner}.{name}"))


def add_loss_scale(setting: Setting, graph: LogicalGraph) -> None:
    """Give the states of a loss scale their first values, on the ranks where they live."""
    for node in graph.of_kind(Input):
        layout = node.value.layout
        if node.role == "state" and node.key in FIRST_VALUES and layout is not None:
            dtype = getattr(torch, node.value.dtype)
            for rank in setting.variables.keys() & layout.placement.coordinates.keys():
                device = setting.world.device(rank)
                first = torch.tensor(FIRST_VALUES[node.key], dtype=dtype, device=device)
                setting.variables[rank].add(node.key, first)


def add_masters(setting: Setting, graph: LogicalGraph) -> None:
    """Give the masters of parameters their first values: those of the parameters."""
    for rank, variables in setting.variables.items():
        for key in layouts_on(graph, rank, "state"):
            parameter, _, state = key.rpartition(".")
            if state == MASTER:
                variables.add(key, variables[parameter].detach().float())


def _add_state(setting: Setting, key: str, whole: Tensor, value: Value | None) -> None:
    if value is None or value.layout is None or value.shape != tuple(whole.shape):
        expected = "no such state" if value is None else f"shape {list(value.shape)}"
        raise UserError(
            f"the optimizer brings the state {key} of shape {list(whole.shape)}, its update has {expected}"
        )
    if whole.is_meta:
        raise UserError(f"the optimizer brings the state {key} without values, on the meta device")
    for rank, variables in setting.variables.items():
        if rank in value.layout.placement.coordinates:
            part = local_part(whole.detach(), value.layout, rank)
            device, dtype = setting.world.device(rank), getattr(torch, value.dtype)
            variables.add(key, part.to(device, dtype, copy=True).contiguous())


def agreed_seed(seed: int, world: World) -> int:
    """The seed of the first process, on all of them."""
    with everyone(world) as channel:
        return seed if channel is None else int(channel.exchange_text(str(seed))[0])


@contextmanager
def everyone(world: World) -> Iterator[Channel | None]:
    """A channel between all processes of the world, each of one rank; None when this process is the only one."""
    if len(world.ranks) == world.size:
        yield None
        return
    group = Communicator(0, tuple(range(world.size)))
    channel = world.connect((group,))[world.ranks[0]][group.id]
    try:
        yield channel
    finally:
        channel.close()


def variable_layouts(graph: LogicalGraph, rank: int) -> dict[str, Layout]:
    """The layout of every parameter and buffer of a compiled graph that `rank` holds a part of."""
    return layouts_on(graph, rank, "parameter", "buffer")


def state_dict_names(model: nn.Module) -> dict[str, str]:
    """For each tensor of the model's `state_dict()`, the key of its variable; tied ones share a key."""
    keys = {id(tensor): key for key, tensor in (*model.named_parameters(), *model.named_buffers())}
    tensors = model.state_dict(keep_vars=True).items()
    return {name: keys[id(tensor)] for name, tensor in tensors if isinstance(tensor, Tensor)}


def load_whole(setting: Setting, graph: LogicalGraph, state: Mapping[str, Tensor]) -> None:
    """Write each rank's part of whole tensors into its variables.

    Raises:
        UserError: naming the entries that are missing, unknown, or of another shape; nothing is
            written then.
    """
    names = state_dict_names(setting.model)
    if set(state) != set(names):
        missing, unknown = sorted(set(names) - set(state)), sorted(set(state) - set(names))
        raise UserError(f"the state lacks {missing[:5]} and has the unknown entries {unknown[:5]}")
    shapes = {node.key: node.value.shape for node in graph.of_kind(Input)}
    for name, key in names.items():
        if tuple(state[name].shape) != shapes[key]:
            raise UserError(
                f"{name} has shape {list(shapes[key])}, the state holds {list(state[name].shape)}"
            )
    with torch.no_grad():
        for rank, variables in setting.variables.items():
            layouts = variable_layouts(graph, rank)
            for name, key in names.items():
                if key in layouts:
                    part = local_part(state[name], layouts[key], rank)
                    for written in (key, f"{key}.{MASTER}"):
                        if written in variables:
                            variables.write(written, part)
