"""Variables of a program: every rank's part of the model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from weft.compiler.training.gradients import FIRST_VALUES
from weft.errors import UserError, shown, wrong
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.ir.nodes import MASTER
from weft.layout import Broadcast, Layout, Placement, Shares
from weft.program.data.feed import layouts_on, shares_of
from weft.program.setting import ProgramSetting
from weft.runtime.memory.state import Variables, local_part
from weft.tensor import GlobalTensor
from weft.tensor.boxing import assemble
from weft.tensor.dispatch.interleaved import change_layout, in_order, in_shares, stored_in
from weft.tensor.spec import Mesh, contiguous

# The name under which a state_dict() has what a module gives by get_extra_state().
_EXTRA = "_extra_state"


def add_loss_scale(setting: ProgramSetting, graph: LogicalGraph) -> None:
    """Give the states of a loss scale their first values, on the ranks where they live."""
    for node in graph.of_kind(Input):
        layout = node.value.layout
        if node.role == "state" and node.key in FIRST_VALUES and layout is not None:
            dtype = getattr(torch, node.value.dtype)
            for rank in setting.variables.keys() & layout.placement.coordinates.keys():
                device = setting.world.device(rank)
                first = torch.tensor(FIRST_VALUES[node.key], dtype=dtype, device=device)
                setting.variables[rank].add(node.key, first)


def add_main_parameters(every: Mapping[int, Variables], graph: LogicalGraph) -> None:
    """Give those FP32 main parameters of parameters that are not there yet their first values: those of the
    parameters.
    """
    for rank, variables in every.items():
        for key in layouts_on(graph, rank, "state"):
            parameter, _, state = key.rpartition(".")
            if state == MASTER and key not in variables:
                variables.add(key, variables[parameter].detach().float())


def state_dict_names(model: nn.Module) -> dict[str, str]:
    """For each tensor of the model's `state_dict()`, the key of its variable; tied ones share a key.

    Values from a module's `get_extra_state()` are not variables.

    Raises:
        UserError: there is a tensor that is neither parameter nor buffer, as a hook makes it.
    """
    keys = {id(tensor): key for key, tensor in (*model.named_parameters(), *model.named_buffers())}
    keys_of = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or name.rpartition(".")[2] == _EXTRA:
            continue
        if id(tensor) not in keys:
            raise UserError(
                f"the model's state_dict() has {name}, a tensor of shape {list(tensor.shape)} that is neither a "
                "parameter nor a buffer of it, as hooks on state_dict() make; take the hook off, or let it leave "
                "tensors as they are"
            )
        keys_of[name] = keys[id(tensor)]
    return keys_of


def _check_whole(names: Mapping[str, str], graph: LogicalGraph, state: object) -> None:
    if not isinstance(state, Mapping):
        raise wrong("a state", "whole tensors by name, as full_state_dict() gives them", state)
    if set(state) != set(names):
        missing, unknown = sorted(set(names) - set(state)), sorted(set(state) - set(names))
        raise UserError(
            f"the state lacks {missing[:5]} and has the unknown entries {unknown[:5]}; expected the names of "
            "model.state_dict(), as full_state_dict() gives them"
        )
    shapes = {node.key: node.value.shape for node in graph.of_kind(Input)}
    for name, key in names.items():
        if not isinstance(state[name], Tensor):
            raise UserError(
                f"{name} is a tensor, the state holds {shown(state[name])}; expected whole tensors"
            )
        if tuple(state[name].shape) != shapes[key]:
            raise UserError(
                f"{name} has shape {list(shapes[key])}, the state holds {list(state[name].shape)}; expected whole "
                "tensors of the model's shapes, as full_state_dict() gives them"
            )


def load_whole(setting: ProgramSetting, graph: LogicalGraph, state: Mapping[str, Tensor]) -> None:
    """Write each rank's part of whole tensors into its variables, once all names and shapes are right."""
    names = state_dict_names(setting.model)
    _check_whole(names, graph, state)
    shares = shares_of(graph)
    with torch.no_grad():
        for rank, variables in setting.variables.items():
            layouts = layouts_on(graph, rank, "parameter", "buffer")
            for name, key in names.items():
                if key in layouts:
                    part = local_part(in_shares(state[name], shares.get(key)), layouts[key], rank)
                    for written in (key, f"{key}.{MASTER}"):
                        if written in variables:
                            variables.write(written, part)


# By model, what of torch's wraps it.
_wrappers: WeakKeyDictionary[nn.Module, WeakSet[DistributedDataParallel]] = WeakKeyDictionary()


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model that `DistributedDataParallel`, `DataParallel` or `torch.compile` wraps; others as they are.

    Parts that `torch.compile` wraps replace their wrapper, so that all names are those of the plain model.

    Raises:
        UserError: when `fully_shard` or another library has made the model's parameters DTensors;
            when a lazy module was never called.
    """
    wrappers = []
    while True:
        if isinstance(model, DistributedDataParallel):
            wrappers.append(model)
            model = model.module
        elif isinstance(model, DataParallel):
            model = model.module
        elif (inner := _uncompiled(model)) is not model:
            model = inner
        else:
            break
    _check_plain(model)
    for path, part in reversed(list(model.named_modules(remove_duplicate=False))):
        if (inner := _uncompiled(part)) is not part:
            around, _, name = path.rpartition(".")
            setattr(model.get_submodule(around), name, inner)
    if wrappers:
        _wrappers.setdefault(model, WeakSet()).update(wrappers)
    return model


def _uncompiled(module: nn.Module) -> nn.Module:
    while isinstance(getattr(module, "_orig_mod", None), nn.Module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


def _check_plain(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise wrong("weft.compile: model", "a torch.nn.Module as the model", model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(
                f"weft.compile takes a plain module, got {name} as a DTensor, as fully_shard and parallelize_module "
                "make them: compile the module as it was before; weft lays its parameters out itself"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"{name} has no shape yet, as its lazy module was never called: call the model once, "
                "model(batch), before the optimizer is made and weft.compile called"
            )


@contextmanager
def without_ddp_reducers(model: nn.Module) -> Iterator[None]:
    """Take out the reducers of a model's `DistributedDataParallel`, which hold its tensors.

    Calls of a wrapper then go directly to the model; if the block raises, later calls
    raise: without its reducer a wrapper would not reduce gradients.

    Private API: the attributes `reducer` and `logger` of the wrapper.
    """

    def refuse(*arguments: object, **named: object) -> None:
        raise UserError(
            "weft.compile had taken this DistributedDataParallel out when it refused the model; wrap the model again: "
            "DistributedDataParallel(wrapper.module)"
        )

    wrappers = list(_wrappers.get(model, ()))
    for wrapper in wrappers:
        vars(wrapper).pop("reducer", None)
        wrapper.logger = None
        vars(wrapper)["forward"] = refuse
    yield
    for wrapper in wrappers:
        vars(wrapper)["forward"] = wrapper.module.forward


# Conversion of a live model's values to the layouts of plans, and back to whole tensors.
#
# `swap` gives a tensor object another content, so that all who hold the object see it. Private API:
# `torch._C._swap_tensor_impl`, `Tensor._use_count`. `torch.utils.swap_tensors` does the same, but refuses tensors that
# are referred to weakly, as recurrent layers refer to their weights; these references are to the object, which stays.


def by_placement(variables: Mapping[int, Variables], parameter: Tensor) -> list[Variables]:
    """The variables of this process's ranks, in the order of a parameter's placement."""
    if isinstance(parameter, GlobalTensor):
        return [variables[rank] for rank in parameter.spec.mesh.ranks if rank in variables]
    return list(variables.values())


def parts_of(tensor: GlobalTensor) -> dict[int, Tensor]:
    """The part of every rank of this process as it is stored, in shares or not."""
    return dict(zip(tensor.spec.mesh.ranks, tensor.locals, strict=True))


def of_rank(value: Any, rank: int) -> Any:
    """The part that a rank of this process has of a value: its part of a global tensor, all of anything else."""
    return parts_of(value)[rank] if isinstance(value, GlobalTensor) else value


def cut_value(
    value: Tensor, layout: Layout, mesh: Mesh, shares: Shares | None = None
) -> GlobalTensor:
    """A global tensor of a whole value; the part that is all of it shares memory where there is one only."""
    shape, value, parts = tuple(value.shape), in_shares(value.detach(), shares), []
    for rank in mesh.ranks:
        part = local_part(value, layout, rank)
        copied = part.shape != value.shape or len(mesh.ranks) > 1
        parts.append(part.to(mesh.device_of(rank), copy=copied).contiguous())
    return global_of(parts, layout, mesh, shape, value.dtype, shares)


def global_of(
    parts: Sequence[Tensor],
    layout: Layout,
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    shares: Shares | None = None,
) -> GlobalTensor:
    """A global tensor of the parts of this process's ranks, contiguous, as they are stored."""
    spec = contiguous(mesh, layout, shape, dtype)
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
    # A tensor in one process alone may be of an earlier local world, or of one stage of this job.
    if tensor.spec.mesh.in_process and not tensor.spec.mesh.same_job(mesh):
        return cut_value(whole_of(tensor), layout, mesh, shares)
    spec, parts = change_layout(tensor.spec, tensor.locals, layout, mesh, tensor.shares, shares)
    moved: GlobalTensor = stored_in(GlobalTensor(spec, parts), shares)
    return moved


def whole_of(tensor: Any) -> Any:
    """A plain copy of a tensor, whole; what is not a tensor itself. Collective."""
    if not isinstance(tensor, GlobalTensor):
        return tensor.detach().clone() if isinstance(tensor, Tensor) else tensor
    mesh = tensor.spec.mesh
    # A stage may be in one process alone, and still the others want its tensors.
    if not mesh.world.several:
        found = assemble(tensor.spec, parts_of(tensor)).detach()
        return in_order(found, tensor.shares).clone()
    size = mesh.world.size
    everywhere = Placement(mesh.placement.device_type, (size,), tuple(range(size)))
    detached: Any = tensor.detach()
    with torch.no_grad():
        return detached.to_global(placement=everywhere, sbp=Broadcast()).full()


def check_unused(tensor: Tensor, name: str) -> None:
    """Raise UserError, naming a tensor, when a graph of autograd needs its values, so that it cannot be swapped."""
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    # A graph that has run backward still ends in what adds the gradient up.
    if uses > (2 if tensor.requires_grad else 1):
        raise UserError(
            f"{name} cannot be moved to the program, as an autograd graph needs its values: let the losses and "
            "outputs of earlier calls of the model go (del loss), or run their backward, first. Or there is a view "
            "of it, such as a buffer tensor[:3]: give it memory of its own, tensor[:3].clone()"
        )


def swap(one: Tensor, other: Tensor) -> None:
    """Exchange class, attributes and data of two tensors; a graph of autograd that ends in `one` is of no use then."""
    if one._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(one).node.register_prehook(_too_late)
    exchange(one, other)


def exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the data of two tensors until the next exchange; autograd graphs keep what they have."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _too_late(gradients: object) -> None:
    raise UserError(
        "backward() of a loss from before weft.compile took the model over; call the model again for a new loss"
    )
