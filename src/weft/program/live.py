"""The live model: its parameters and buffers are the variables of programs, each in the layout that stores it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from weft.capture.optimizers import Optimizing, optimizers_of
from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.layout import Broadcast, Layout, Placement, Shares
from weft.program.everyone import agreed, check_same_example, everyone, told
from weft.program.initial import check_initial_values, initial_values
from weft.program.shards import local_part, shares_of
from weft.program.swap import check_unused, swap
from weft.program.unwrapped import retired
from weft.runtime.state import Variables
from weft.runtime.world import World
from weft.tensor import GlobalTensor
from weft.tensor.global_tensor import keep_gradient_with
from weft.tensor.mesh import Mesh, mesh_of
from weft.tensor.shares import in_order, in_shares, relaid, stored_in
from weft.tensor.spec import contiguous
from weft.tensor.whole import assemble

# Attributes of global tensors, which plain ones do not have.
_OF_GLOBAL = ("spec", "locals", "shares", "hold", "origin", "keeps_gradient")


class Hold:
    """What holds a global tensor live, as its `hold`.

    Attributes:
        programs: that are open and read the tensor, or write it.
        stored: the axis along which its layout is only how it is stored, as ZeRO lays it, and says
            nothing of how it is used; None where there is none.
    """

    def __init__(self, stored: int | None) -> None:
        self.programs: WeakSet[Any] = WeakSet()
        self.stored = stored


@dataclass(frozen=True)
class Lying:
    """How the tensors of a model lie that open programs hold.

    Attributes:
        layouts: by key.
        stored: by key, the axis of `Hold.stored`.
        shares: in which they are stored, by key, those that are.
    """

    layouts: Mapping[str, Layout]
    stored: Mapping[str, int]
    shares: Mapping[str, Shares]

    def homes(self, placements: Sequence[Placement]) -> dict[str, int] | None:
        """The stage of each, where stages run on `placements`; None where nothing is held.

        Raises:
            UserError: naming one that lies on ranks where no stage is.
        """
        for key, layout in self.layouts.items():
            if layout.placement not in placements:
                raise UserError(
                    f"{key} lies on {layout.placement} for another program that is open, and no part of this one runs "
                    "there; compile both for the same placement and stages, or close the other one"
                )
        found = {key: placements.index(x.placement) for key, x in self.layouts.items()}
        return found or None


def named_variables(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by key; a tensor with several names stands under the first."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def lying(model: nn.Module, world: World) -> Lying:
    """How the tensors of a model lie that open programs hold: another program must take them so.

    A program that nobody closed ends on each process in its own time; it counts until it has ended
    on all. Every process must call it.
    """
    own = "\n".join(_held(model))
    names = {name for text in told(world, "what lies", lambda: own) for name in text.split("\n")}
    held = {key: x for key, x in _global(model).items() if key in names}
    return Lying(
        {key: x.spec.layout for key, x in held.items()},
        {key: x.hold.stored for key, x in held.items() if x.hold and x.hold.stored is not None},
        {key: x.shares for key, x in held.items() if x.shares is not None},
    )


def _held(model: nn.Module) -> list[str]:
    """The names of tensors that open programs of this process hold."""
    return [key for key, x in _global(model).items() if x.hold and x.hold.programs]


def _worlds(model: nn.Module) -> list[World]:
    """Where the tensors of a live model lie: in one world, but for what was laid in others before."""
    return list(dict.fromkeys(x.spec.mesh.world for x in _global(model).values()))


def hold(model: nn.Module, program: Any) -> None:
    """Note that a program works with the tensors of a model until `let_go`."""
    for tensor in _global(model).values():
        tensor.hold.programs.add(program)


def let_go(model: nn.Module, program: Any) -> None:
    """Note that a program was closed."""
    for tensor in _global(model).values():
        if tensor.hold is not None:
            tensor.hold.programs.discard(program)
    _constants.pop(program, None)


def take_over(
    model: nn.Module,
    graph: LogicalGraph,
    stored: Mapping[str, int],
    world: World,
    placement: Placement,
) -> dict[int, Variables]:
    """Make the tensors of a model those of a program, and give every rank of this process its part.

    With several ranks they become `GlobalTensor`s; with one they stay ordinary tensors. Values are
    those of the first process; one tensor is whole at a time.

    Args:
        model: plain, on the meta device, or live already.
        graph: compiled; says how parameters and buffers lie.
        stored: by key, the axis along which a layout is only how a tensor is stored.
        world, placement: of the program.

    Raises:
        UserError: on every process, before anything is taken over, what one of them finds against it.
    """
    layouts = {
        node.key: node.value.layout
        for node in graph.of_kind(Input)
        if node.role in ("parameter", "buffer") and node.value.layout is not None
    }
    shares = shares_of(graph)
    parts: dict[int, dict[str, Tensor]] = {
        rank: {} for rank in world.ranks if rank in placement.coordinates
    }
    device = world.device(next(iter(parts)))
    alone = len(placement.ranks) == 1

    def check() -> str:
        check_initial_values(model)
        for key, own in named_variables(model).items():
            if not isinstance(own, GlobalTensor) and not (alone and _stays(own, device)):
                _check_free(model, key, own)
        return "; ".join(str(node) for node in graph.of_kind(Input) if node.role == "batch")

    with retired(model):
        check_same_example(told(world, "what is taken over", check))
    meshes = _meshes(model, layouts.values())
    with everyone(world) as channel:
        values = initial_values(model, device, lambda fill: agreed(world, "first values", fill))
        for key, own, value in values:
            layout = layouts[key]
            if isinstance(own, GlobalTensor):
                _lay(own, layout, meshes[layout.placement], shares.get(key))
            else:
                value = value.detach().to(device).contiguous()
                value = value if channel is None else channel.broadcast(value, 0)
                if not alone:
                    value = cut_value(value, layout, meshes[layout.placement], shares.get(key))
                if not alone or not _stays(own, device):
                    _swap(own, value)
            if isinstance(own, GlobalTensor) and (own.hold is None or not own.hold.programs):
                own.hold = Hold(stored.get(key))
            for rank, part in _parts(own, placement).items():
                parts[rank][key] = part
    return {rank: Variables(own) for rank, own in parts.items()}


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
    optimizers = optimizers_of(optimizer)
    for world in _worlds(model):
        world.calls.enter("release")
        told(world, "what can be released", lambda: _check_released(model))
    for tensor in _global(model).values():
        _swap(tensor, whole_of(tensor))
    for entries in (state for one in optimizers.each for state in one.state.values()):
        for name, value in entries.items():
            if isinstance(value, GlobalTensor):
                entries[name] = whole_of(value)


def _check_released(model: nn.Module) -> str:
    for name in _held(model)[:1]:
        raise UserError(
            f"weft.release: an open program works with {name}; call program.close() first"
        )
    for key, tensor in _global(model).items():
        check_unused(tensor, key)
    return ""


def whole_of(tensor: GlobalTensor) -> Tensor:
    """A plain copy of a global tensor; collective."""
    mesh = tensor.spec.mesh
    size = mesh.world.size
    # A stage may lie in one process alone, and still the others want its tensors.
    if len(mesh.world.ranks) == size:
        found = assemble(tensor.spec, parts_of(tensor)).detach()
        return in_order(found, tensor.shares).clone()
    everywhere = Placement(mesh.placement.device_type, (size,), tuple(range(size)))
    detached: Any = tensor.detach()
    with torch.no_grad():
        whole: Tensor = detached.to_global(placement=everywhere, sbp=Broadcast()).full()
    return whole


def _global(model: nn.Module) -> dict[str, Any]:
    return {key: x for key, x in named_variables(model).items() if isinstance(x, GlobalTensor)}


def by_placement(variables: Mapping[int, Variables], parameter: Tensor) -> list[Variables]:
    """The variables of this process's ranks, in the order of a parameter's placement."""
    if isinstance(parameter, GlobalTensor):
        return [variables[rank] for rank in parameter.spec.mesh.ranks if rank in variables]
    return list(variables.values())


def parts_of(tensor: GlobalTensor) -> dict[int, Tensor]:
    """The part of every rank of this process as it is stored, in shares or not."""
    return dict(zip(tensor.spec.mesh.ranks, tensor.locals, strict=True))


def _parts(own: Tensor, placement: Placement) -> dict[int, Tensor]:
    """For every rank of this process, its part of a live tensor."""
    if isinstance(own, GlobalTensor):
        return parts_of(own)
    return {placement.ranks[0]: own.detach()}


# By program, the tensors of elsewhere that it reads.
_constants: WeakKeyDictionary[Any, Callable[[], Iterable[Tensor]]] = WeakKeyDictionary()


def reads(program: Any, constants: Callable[[], Iterable[Tensor]]) -> None:
    """Note that a program reads tensors that are none of its model, wherever they lie; `constants()` gives them."""
    _constants[program] = constants


def _kept_with_graph(model: nn.Module) -> str:
    """What to do about a tensor that a module keeps with its graph of autograd; "" where there is none."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                return (
                    f". {path}.{name} is kept by its module with such a graph, as torch.nn.utils.weight_norm and "
                    "torch.nn.utils.prune do: use torch.nn.utils.parametrizations, make pruning permanent "
                    f"(prune.remove), or cut it off, module.{name} = module.{name}.detach(), which a call of the "
                    "module computes anew"
                )
    return ""


def _check_free(model: nn.Module, key: str, own: Tensor) -> None:
    """Check that nothing would go on with what a tensor is before it is taken over: no graph, no open program."""
    try:
        check_unused(own, key)
    except UserError as error:
        raise UserError(f"{error}{_kept_with_graph(model)}") from None
    if any(own is each for constants in list(_constants.values()) for each in constants()):
        raise UserError(
            f"an open program reads {key} as a constant of its step, and would not see how it goes on; give both "
            'models as one to both programs, nn.ModuleDict({"model": …, "other": …}), or close that program'
        )


def _stays(own: Tensor, device: torch.device) -> bool:
    """Whether the memory of a plain tensor can be that of a program with one rank."""
    return own.device == device and own.is_contiguous()


def _meshes(model: nn.Module, layouts: Iterable[Layout]) -> dict[Placement, Mesh]:
    """The meshes on which a program lays a model, of one family where they are several."""
    placements = dict.fromkeys(layout.placement for layout in layouts)
    held = [x.spec.mesh.family for x in _global(model).values() if x.hold and x.hold.programs]
    family = frozenset(placements).union(*held)
    return {x: mesh_of(x, family if len(family) > 1 else frozenset()) for x in placements}


def cut_value(
    value: Tensor, layout: Layout, mesh: Mesh, shares: Shares | None = None
) -> GlobalTensor:
    """A global tensor of a whole value; the part that is all of it shares memory where there is one only."""
    spec = contiguous(mesh, layout, tuple(value.shape), value.dtype)
    value, parts = in_shares(value.detach(), shares), []
    for rank in mesh.ranks:
        part = local_part(value, layout, rank)
        copied = part.shape != value.shape or len(mesh.ranks) > 1
        parts.append(part.to(mesh.device_of(rank), copy=copied).contiguous())
    made: GlobalTensor = stored_in(GlobalTensor(spec, tuple(parts)), shares)
    return made


def laid_as(
    tensor: GlobalTensor,
    layout: Layout,
    dtype: torch.dtype,
    shares: Shares | None = None,
    mesh: Mesh | None = None,
) -> GlobalTensor:
    """A global tensor in a layout of the current world, in shares, and in a dtype; itself when it is so."""
    mesh = mesh or tensor.spec.mesh.at(layout.placement)
    if tensor.dtype != dtype:
        tensor = tensor.detach().to(dtype)  # type: ignore[assignment]
    if tensor.spec.layout == layout and tensor.spec.mesh is mesh and tensor.shares == shares:
        return tensor
    if tensor.spec.mesh.in_process and not mesh.in_process:
        return cut_value(whole_of(tensor), layout, mesh, shares)
    spec, parts = relaid(tensor.spec, tensor.locals, layout, mesh, tensor.shares, shares)
    moved: GlobalTensor = stored_in(GlobalTensor(spec, parts), shares)
    return moved


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


def _swap(own: Tensor, content: Tensor) -> None:
    """Give the object `own` another content; what users put on it, attributes, hooks and a gradient, stays."""
    new = content.detach()
    if isinstance(own, nn.Parameter):
        new = nn.Parameter(new, own.requires_grad)
    kept = {name: x for name, x in vars(own).items() if name not in vars(new)}
    hooks, gradient = own._backward_hooks or {}, own.grad
    own.grad = None
    swap(own, new)
    vars(own).update({name: x for name, x in kept.items() if name not in _OF_GLOBAL})
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
        return whole_of(gradient)
    return gradient
