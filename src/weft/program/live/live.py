"""The user's model, live: its parameters and buffers are the variables of programs, until they are given back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.optimizers.given import attributes_of
from weft.capture.optimizers.groups import Optimizing, optimizers_of
from weft.errors import UserError, shown
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.layout import Layout, Placement, Shares
from weft.program.agreement import agreed, everyone, told
from weft.program.feeding.shards import shares_of
from weft.program.live.first_values import check_initial_values, initial_values
from weft.program.live.holds import (
    LiveHold,
    check_unread,
    global_variables,
    held_names,
    named_variables,
)
from weft.program.live.laid import check_unused, cut_value, laid_as, parts_of, swap, whole_of
from weft.program.live.optimizer_state import agree
from weft.program.live.variables import retired
from weft.runtime.memory.state import Variables
from weft.runtime.world.world import World
from weft.tensor import GlobalTensor
from weft.tensor.global_tensor import keep_gradient_with
from weft.tensor.mesh import Mesh, mesh_of


def take_over(
    model: nn.Module,
    graph: LogicalGraph,
    stored: Mapping[str, int],
    world: World,
    placement: Placement,
    later: Collection[str] = (),
) -> dict[int, Variables]:
    """Make the tensors of a model those of a program, and give every rank of this process its part.

    With several ranks they become `GlobalTensor`s; with one they stay ordinary tensors. Values are
    those of the first process; one tensor is whole at a time.

    Args:
        model: plain, on the meta device, or live already.
        graph: compiled; says how parameters and buffers lie.
        stored: by key, the axis along which a layout is only how a tensor is stored.
        later: names of tensors that get their values later: those on the meta device are zero until then.

    Raises:
        UserError: on every process, before anything is taken over, what one of them finds against it.
    """
    inputs = [node for node in graph.of_kind(Input) if node.role in ("parameter", "buffer")]
    layouts = {node.key: node.value.layout for node in inputs if node.value.layout is not None}
    shares = shares_of(graph)
    ranks = [rank for rank in world.ranks if rank in placement.coordinates]
    parts: dict[int, dict[str, Tensor]] = {rank: {} for rank in ranks}
    device, alone = world.device(ranks[0]), len(placement.ranks) == 1
    _agree(model, world, device, alone, later)
    meshes = _meshes(model, graph.placements)
    with everyone(world) as channel:
        values = initial_values(
            model, device, lambda fill: agreed(world, "first values", fill), later
        )
        for key, own, value in values:
            layout, mesh = layouts[key], meshes[layouts[key].placement]
            if isinstance(own, GlobalTensor):
                _lay(own, layout, mesh, shares.get(key))
            else:
                if value is None:  # it takes no memory until it is cut
                    value = torch.zeros((), dtype=own.dtype, device=device).expand(own.shape)
                    value = value.contiguous() if alone else value
                else:
                    value = value.detach().to(device).contiguous()
                    value = value if channel is None else channel.broadcast(value, 0)
                if not alone:
                    _swap(own, cut_value(value, layout, mesh, shares.get(key)))
                elif not _stays(own, device):
                    _swap(own, value)
            for rank, part in _parts(own, placement, stored.get(key)).items():
                parts[rank][key] = part
    return {rank: Variables(own) for rank, own in parts.items()}


def _agree(
    model: nn.Module, world: World, device: torch.device, alone: bool, later: Collection[str]
) -> None:
    """Check on every process that a model can be taken over.

    Args:
        model: to be taken over.
        device: of the first rank here.
        alone: True where it is the only rank, on whose device plain tensors stay as they are.
        later: names of tensors that get their values later.

    Raises:
        UserError: on every process, what one of them finds against it.
    """

    def check() -> None:
        check_initial_values(model, device, later)
        for key, tensor in named_variables(model).items():
            plain = not isinstance(tensor, GlobalTensor)
            if plain and not (alone and _stays(tensor, device)):
                _check_free(model, key, tensor)

    with retired(model):
        agreed(world, "what is taken over", check)


def _kept_with_graph(model: nn.Module) -> str:
    """The tensor that a module keeps with its graph of autograd, and what to do; "" where there is none."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                return (
                    f"{path}.{name} is kept by its module with such a graph, as the old torch.nn.utils.weight_norm, "
                    "spectral_norm and prune do. Use torch.nn.utils.parametrizations.weight_norm or .spectral_norm, "
                    f"make pruning permanent (prune.remove), or cut it off, module.{name} = module.{name}.detach(), "
                    "which a call of the module computes anew"
                )
    return ""


def _check_free(model: nn.Module, key: str, own: Tensor) -> None:
    """Check that nothing would go on with what a tensor is before it is taken over: no graph, no open program."""
    try:
        check_unused(own, key)
    except UserError as error:
        kept = _kept_with_graph(model)
        reason = f"{key} cannot be taken over, as a graph of autograd needs its values: {kept}"
        raise UserError(reason if kept else str(error)) from None
    check_unread(key, own)


def _meshes(model: nn.Module, placements: Sequence[Placement]) -> dict[Placement, Mesh]:
    """The meshes on which a program runs, of one family where they are several."""
    held = [
        x.spec.mesh.family for x in global_variables(model).values() if x.hold and x.hold.programs
    ]
    family = frozenset(placements).union(*held)
    return {x: mesh_of(x, family if len(family) > 1 else frozenset()) for x in placements}


def _parts(own: Tensor, placement: Placement, stored: int | None) -> dict[int, Tensor]:
    """For every rank of this process, its part of a live tensor, which is held from now on."""
    if not isinstance(own, GlobalTensor):
        return {placement.ranks[0]: own.detach()}
    if own.hold is None or not own.hold.programs:
        own.hold = LiveHold(stored)
    return parts_of(own)


def _stays(own: Tensor, device: torch.device) -> bool:
    """True where the memory of a plain tensor can be that of a program with one rank."""
    return own.device == device and own.is_contiguous()


def _lay(tensor: GlobalTensor, layout: Layout, mesh: Mesh, shares: Shares | None) -> None:
    """Bring a live tensor to another layout, in the current world."""
    moved = laid_as(tensor, layout, tensor.dtype, shares, mesh)
    if moved is tensor:
        return
    gradient, tensor.grad, tensor.hold = tensor.grad, None, None
    tensor.become(moved)
    if isinstance(gradient, GlobalTensor):
        tensor.grad = laid_as(gradient, layout, gradient.dtype, mesh=mesh)
    if tensor.requires_grad:
        keep_gradient_with(tensor)


def release(model: nn.Module, optimizer: Optimizing = None) -> None:
    """Give a model whose programs are closed ordinary, whole tensors back, the same on every process.

    Every process must call it.

    Args:
        model: live, as `weft.compile` leaves it; what is not live stays as it is.
        optimizer: whose states become whole, too; one, or a list of several.

    Raises:
        UserError: when a program of the model is still open, or a graph of autograd needs it, on any
            process.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"weft.release takes a torch.nn.Module, found {shown(model)}")
    optimizers = optimizers_of(optimizer)
    for world in _worlds(model):
        world.calls.enter("release")
        told(world, "what can be released", lambda: _check_released(model))
    agree(optimizers.each)
    for tensor in global_variables(model).values():
        _swap(tensor, whole_of(tensor))
    for one in optimizers.each:
        for parameter, entries in one.state.items():
            # An ordinary dict: what a program shows cannot be read by `torch.load(…, weights_only=True)`.
            one.state[parameter] = {name: _whole(value) for name, value in entries.items()}


def _whole(value: Any) -> Any:
    return whole_of(value) if isinstance(value, GlobalTensor) else value


def _worlds(model: nn.Module) -> list[World]:
    """The worlds of a live model's tensors: one world, but for those that were laid in others before."""
    return list(dict.fromkeys(x.spec.mesh.world for x in global_variables(model).values()))


def _check_released(model: nn.Module) -> str:
    for name in held_names(model)[:1]:
        raise UserError(
            f"weft.release: an open program works with {name}; call program.close() first"
        )
    for key, tensor in global_variables(model).items():
        check_unused(tensor, key)
    return ""


def _swap(own: Tensor, content: Tensor) -> None:
    """Give the object `own` another content; what users put on it, attributes, hooks and a gradient, stays."""
    new = content.detach()
    if isinstance(own, nn.Parameter):
        new = nn.Parameter(new, own.requires_grad)
    kept = {name: x for name, x in attributes_of(own).items() if name not in vars(new)}
    hooks, gradient = own._backward_hooks or {}, own.grad
    own.grad = None
    swap(own, new)
    vars(own).update(kept)
    own._backward_hooks = OrderedDict(
        (key, hook) for key, hook in hooks.items() if not hasattr(hook, "lays_gradient")
    )
    if gradient is not None:
        own.grad = _like(gradient, own)
    if isinstance(own, GlobalTensor) and own.requires_grad:
        keep_gradient_with(own)


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient, global or plain as its parameter is."""
    if isinstance(parameter, GlobalTensor) and not isinstance(gradient, GlobalTensor):
        return cut_value(gradient, parameter.spec.layout, parameter.spec.mesh)
    if isinstance(gradient, GlobalTensor) and not isinstance(parameter, GlobalTensor):
        gradient = whole_of(gradient)
    return gradient
