"""Variables of a program: every rank's part of the model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from weft.program.data.feed import layouts_on, shares_of
from weft.program.setting import ProgramSetting
from weft.runtime.memory.state import Variables, local_part
from weft.tensor.dispatch.interleaved import in_shares

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

    Values from a module's `get_extra_state()` are no variables.

    Raises:
        UserError: there is a tensor that is neither parameter nor buffer, as a hook makes it.
    """
    keys = {id(tensor): key for key, tensor in (*model.named_parameters(), *model.named_buffers())}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or name.rpartition(".")[2] == _EXTRA:
            continue
        if id(tensor) not in keys:
            raise UserError(
                f"the model's state_dict() has {name}, a tensor of shape {list(tensor.shape)} that is neither a "
                "parameter nor a buffer of it, as hooks on state_dict() make; take the hook off, or let it leave "
                "tensors as they are"
            )
        found[name] = keys[id(tensor)]
    return found


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

    Parts of it that `torch.compile` wraps take the wrapper's place, so that all names are those of the plain model.

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

    Calls of a wrapper then go straight to the model; when what is done inside raises, they raise:
    without its reducer a wrapper would not reduce gradients.

    Private API: the attributes `reducer` and `logger` of the wrapper.
    """

    def refuse(*arguments: object, **named: object) -> None:
        raise UserError(
            "weft.compile had taken this DistributedDataParallel out when it refused the model; wrap the model anew: "
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
