"""The user's model, live: its parameters and buffers are the variables of programs, until they are given back."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from weft.capture.optimizer_groups import Optimizing, optimizers_of
from weft.capture.optimizers.attributes import attributes_of
from weft.errors import UserError, wrong
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.layout import Layout, Placement, Shares
from weft.program.agreement import everyone, run_on_all
from weft.program.data.feed import shares_of
from weft.program.live.ownership import (
    LiveOwners,
    check_unread,
    global_variables,
    held_names,
    named_variables,
)
from weft.program.live.updated import agree
from weft.program.live.variables import (
    check_unused,
    cut_value,
    laid_as,
    parts_of,
    swap,
    whole_of,
    without_ddp_reducers,
)
from weft.runtime.memory.state import Variables
from weft.runtime.world.world import World
from weft.tensor import GlobalTensor
from weft.tensor.global_tensor import keep_gradient_with
from weft.tensor.spec import Mesh, mesh_of

# Writes the own tensors of a copy of a module.
Fill: TypeAlias = Callable[[nn.Module], object]


def initial_values(
    model: nn.Module,
    device: torch.device,
    agree: Callable[[Callable[[], nn.Module]], nn.Module],
    later: Collection[str] = (),
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Every parameter and buffer of a model, tied ones once: its name, itself and its value.

    A tensor is its own value, unless it is on the meta device: then its module is filled on `device`, by
    `reset_parameters()`, or by `_init_weights(module)` of the model around it, as in `transformers` and `timm`. Only
    one such module is whole at a time. Call `check_initial_values` first.

    Args:
        agree: calls what fills a module, and raises when that fails on any process.
        later: names of tensors that get their values later; on the meta device their value is None.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        own, filled = _own_tensors(module), dict[str, Tensor]()
        fill = _filler(model, path, module)
        if fill is not None and _to_fill(path, module, later):
            filled = _own_tensors(agree(partial(_written, module, fill, device)))
        for name, tensor in own.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                key = _join(path, name)
                yield key, tensor, filled.pop(name, None) if tensor.is_meta else tensor


def check_initial_values(
    model: nn.Module, device: torch.device, later: Collection[str] = ()
) -> None:
    """Raise UserError, naming the tensors, when some on the meta device have no way to get values.

    A fill function is tried where it may leave some tensor out: buffers, and modules that the model fills.
    """
    unknown: list[str] = []
    for path, module in model.named_modules():
        names = _to_fill(path, module, later)
        fill = _filler(model, path, module) if names else None
        if fill is None:
            unknown += names
            continue
        own = [name.removeprefix(f"{path}.") for name in names]
        if hasattr(module, "reset_parameters"):
            own = [name for name in own if name in module._buffers]
        unknown += [_join(path, name) for name in _passed_over(module, fill, device, own)]
    if unknown:
        where = "no tensor of these weights fills them, and " if later else ""
        raise UserError(
            f"{', '.join(unknown[:5])}{' …' if len(unknown) > 5 else ''} are on the meta device; {where}their modules "
            "have no reset_parameters() to do it, nor the model an _init_weights(module); give them one, or build "
            "these modules on a device"
        )


def _filler(model: nn.Module, path: str, module: nn.Module) -> Fill | None:
    """The way to fill a copy of a module: its own, or that of the nearest module around it that has one for others."""
    if callable(getattr(module, "reset_parameters", None)):
        return lambda twin: twin.reset_parameters()  # type: ignore[operator]
    while True:
        found = getattr(model.get_submodule(path), "_init_weights", None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        if not path:
            return None
        path = path.rpartition(".")[0]


def _passed_over(
    module: nn.Module, fill: Fill, device: torch.device, names: Sequence[str]
) -> list[str]:
    """The tensors that `fill` does not write: they stay different after it ran on zeros and on ones."""
    if not names:
        return []
    found: list[dict[str, Tensor]] = []
    for number in (0, 1):
        # Nothing is drawn for a trial, and both draw the same.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            found.append(_own_tensors(_written(module, fill, device, number)))
    zeros, ones = found
    written = {k for k, x in zeros.items() if not x.is_meta and x.equal(ones[k])}
    return [name for name in names if name not in written]


def _to_fill(path: str, module: nn.Module, later: Collection[str]) -> list[str]:
    names = {_join(path, name): tensor for name, tensor in _own_tensors(module).items()}
    return [name for name, tensor in names.items() if tensor.is_meta and name not in later]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _written(
    module: nn.Module, fill: Fill, device: torch.device, before: int | None = None
) -> nn.Module:
    """A copy of a module, without its children's tensors, whose own tensors `fill` has written, `before` at first."""
    twin = copy.copy(module)
    twin._parameters = {
        name: None
        if value is None
        else nn.Parameter(torch.empty_like(value, device=device), value.requires_grad)
        for name, value in module._parameters.items()
    }
    twin._buffers = {
        name: None if value is None else torch.empty_like(value, device=device)
        for name, value in module._buffers.items()
    }
    with torch.no_grad():
        for tensor in _own_tensors(twin).values() if before is not None else ():
            tensor.fill_(before)  # type: ignore[arg-type]
        fill(twin)
    return twin


def take_over(
    model: nn.Module,
    graph: LogicalGraph,
    stored: Mapping[str, int],
    world: World,
    placement: Placement,
    later: Collection[str] = (),
) -> dict[int, Variables]:
    """Make the tensors of a model those of a program; the part that each rank of this process has.

    With several ranks they become `GlobalTensor`s; with one they stay ordinary tensors. Values are those of the first
    process; one tensor is whole at a time.

    Args:
        stored: by key, the axis along which a layout is only how a tensor is stored.
        later: names of tensors that get their values later; those on the meta device are zero until then.

    Raises:
        UserError: on every process, before anything is taken over, what one of them finds against it.
    """
    inputs = [node for node in graph.of_kind(Input) if node.role in ("parameter", "buffer")]
    layouts = {node.key: node.value.layout for node in inputs if node.value.layout is not None}
    shares = shares_of(graph)
    ranks = [rank for rank in world.ranks if rank in placement.coordinates]
    parts: dict[int, dict[str, Tensor]] = {rank: {} for rank in ranks}
    device, alone = world.device(ranks[0]), len(placement.ranks) == 1
    _check_free(model, world, device, alone, later)
    every = global_variables(model).values()
    held = [x.spec.mesh.family for x in every if x.hold and x.hold.programs]
    # If they are several, meshes are of one family.
    family = frozenset(graph.placements).union(*held)
    family = family if len(family) > 1 else frozenset()
    meshes = {each: mesh_of(each, family) for each in graph.placements}
    with everyone(world) as channel:
        values = initial_values(
            model, device, lambda fill: run_on_all(world, "first values", fill), later
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
            if not isinstance(own, GlobalTensor):
                parts[ranks[0]][key] = own.detach()
                continue
            if own.hold is None or not own.hold.programs:  # it is held from now on
                own.hold = LiveOwners(stored.get(key))
            for rank, part in parts_of(own).items():
                parts[rank][key] = part
    return {rank: Variables(own) for rank, own in parts.items()}


def _check_free(
    model: nn.Module, world: World, device: torch.device, alone: bool, later: Collection[str]
) -> None:
    """Raise on every process what stands against taking a model over; `alone` where this is the only rank."""

    def check() -> None:
        check_initial_values(model, device, later)
        for key, tensor in named_variables(model).items():
            if isinstance(tensor, GlobalTensor) or (alone and _stays(tensor, device)):
                continue
            # Nothing may continue with what the tensor is before: no graph of autograd, no open program.
            try:
                check_unused(tensor, key)
            except UserError as error:
                kept = _kept_with_graph(model)
                reason = f"{key} cannot be moved to the program, as an autograd graph needs its values: {kept}"
                raise UserError(reason if kept else str(error)) from None
            check_unread(key, tensor)

    with without_ddp_reducers(model):
        run_on_all(world, "what is taken over", check)


def _kept_with_graph(model: nn.Module) -> str:
    """The tensor that a module keeps with its graph of autograd, and what to do; "" if there is none."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                return (
                    f"{path}.{name} is kept by its module with an autograd graph, as the old "
                    "torch.nn.utils.weight_norm, "
                    "spectral_norm and prune do. Use torch.nn.utils.parametrizations.weight_norm or .spectral_norm, "
                    f"make pruning permanent (prune.remove), or cut it off, module.{name} = module.{name}.detach(), "
                    "which the next call of the module computes again"
                )
    return ""


def _stays(own: Tensor, device: torch.device) -> bool:
    """True if the memory of a plain tensor can be that of a program with one rank."""
    return own.device == device and own.is_contiguous()


def _lay(tensor: GlobalTensor, layout: Layout, mesh: Mesh, shares: Shares | None) -> None:
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
        raise wrong("weft.release: model", "a torch.nn.Module", model)
    optimizers = optimizers_of(optimizer)

    def check() -> None:
        for name in held_names(model)[:1]:
            raise UserError(
                f"weft.release: an open program works with {name}; call program.close() first"
            )
        for key, tensor in global_variables(model).items():
            check_unused(tensor, key)

    # One world, but for tensors that were laid in others before.
    for world in dict.fromkeys(x.spec.mesh.world for x in global_variables(model).values()):
        world.calls.enter("release")
        run_on_all(world, "what can be released", check)
    agree(optimizers.each)
    for tensor in global_variables(model).values():
        _swap(tensor, whole_of(tensor))
    for one in optimizers.each:
        for parameter, entries in one.state.items():
            # An ordinary dict: what a program shows cannot be read by `torch.load(…, weights_only=True)`.
            one.state[parameter] = {
                name: whole_of(x) if isinstance(x, GlobalTensor) else x
                for name, x in entries.items()
            }


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
        if isinstance(own, GlobalTensor) and not isinstance(gradient, GlobalTensor):
            gradient = cut_value(gradient, own.spec.layout, own.spec.mesh)
        elif isinstance(gradient, GlobalTensor) and not isinstance(own, GlobalTensor):
            gradient = whole_of(gradient)
        own.grad = gradient
    if isinstance(own, GlobalTensor) and own.requires_grad:
        keep_gradient_with(own)
