"""Variables of a program: every rank's part of the model's parameters and buffers, and their first values.

First values are made whole, one at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from weft.compiler.training.loss_scale import FIRST_VALUES
from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.ir.nodes import MASTER
from weft.layout import Layout
from weft.program.feeding.shards import layouts_on, local_part, shares_of
from weft.program.setting import Setting
from weft.tensor.dispatch.shares import in_shares


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
        raise UserError(
            f"the state lacks {missing[:5]} and has the unknown entries {unknown[:5]}; expected the names of "
            "model.state_dict(), as full_state_dict() gives them"
        )
    shapes = {node.key: node.value.shape for node in graph.of_kind(Input)}
    for name, key in names.items():
        if tuple(state[name].shape) != shapes[key]:
            raise UserError(
                f"{name} has shape {list(shapes[key])}, the state holds {list(state[name].shape)}; expected whole "
                "tensors of the model's shapes, as full_state_dict() gives them"
            )
    shares = shares_of(graph)
    with torch.no_grad():
        for rank, variables in setting.variables.items():
            layouts = variable_layouts(graph, rank)
            for name, key in names.items():
                if key in layouts:
                    part = local_part(in_shares(state[name], shares.get(key)), layouts[key], rank)
                    for written in (key, f"{key}.{MASTER}"):
                        if written in variables:
                            variables.write(written, part)


def initial_values(
    model: nn.Module,
    device: torch.device,
    agree: Callable[[Callable[[], nn.Module]], nn.Module],
    later: Collection[str] = (),
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Every parameter and buffer of a model, tied ones once: its name, itself and its value.

    The value of a tensor is itself, unless it is on the meta device: then its module is filled by
    `reset_parameters`, as when it was built, on `device`. Only one such module is whole at a time.
    Call `check_initial_values` first.

    Args:
        model, device: whose values, and where.
        agree: calls what fills a module, and raises when that fails on any process.
        later: names of tensors that get their values later; those on the meta device have None.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = _own_tensors(module)
        fill = partial(_filled, module, device)
        filled = _own_tensors(agree(fill)) if _to_fill(path, module, later) else {}
        for name, tensor in own.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                key = _join(path, name)
                yield key, tensor, filled.pop(name, None) if tensor.is_meta else tensor


def check_initial_values(model: nn.Module, later: Collection[str] = ()) -> None:
    """Raise UserError, naming the tensors, when some on the meta device have no way to get values."""
    unknown = [
        name
        for path, module in model.named_modules()
        if not callable(getattr(module, "reset_parameters", None))
        for name in _to_fill(path, module, later)
    ]
    if unknown:
        where = "no tensor of these weights fills them, and " if later else ""
        raise UserError(
            f"{', '.join(unknown[:5])}{' …' if len(unknown) > 5 else ''} are on the meta device; {where}their modules "
            "have no reset_parameters() to do it; give them one, or build these modules on a device"
        )


def _to_fill(path: str, module: nn.Module, later: Collection[str]) -> list[str]:
    """The module's own tensors on the meta device that have to be filled, by their names in the model."""
    names = {_join(path, name): tensor for name, tensor in _own_tensors(module).items()}
    return [name for name, tensor in names.items() if tensor.is_meta and name not in later]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _filled(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of `module`, without its children's tensors, whose own tensors have their first values."""
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
        twin.reset_parameters()  # type: ignore[operator]
    return twin
