"""States of parameters that no plan of a program updates so far: frozen ones, or those of a branch not taken yet.

The user's optimizer alone holds them, whole or laid like their parameters, until a plan updates the parameter and takes
them over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from weft.layout import broadcast_layout
from weft.layout.layout import Region
from weft.ops.dtypes import dtype_name
from weft.program.live.holds import named_variables
from weft.program.live.laid import parts_of
from weft.program.saving.saved_tensors import Piece, SavedTensor
from weft.program.setting import Setting
from weft.program.training.training import Training
from weft.tensor import GlobalTensor
from weft.tensor.dispatch.shares import stored_in
from weft.tensor.spec import contiguous

# Reads pieces of a tensor of the checkpoint into the part of a rank.
Read = Callable[[str, tuple[Piece, ...], Tensor], object]


@final
class IdleParameter(NamedTuple):
    """A parameter that an optimizer has and no plan updates so far."""

    tensor: Tensor
    optimizer: torch.optim.Optimizer

    @property
    def states(self) -> Mapping[str, Any]:
        """The states that the optimizer holds for it, with values."""
        found = self.optimizer.state.get(self.tensor) or {}
        return {
            name: value
            for name, value in found.items()
            if value is not None and not (isinstance(value, Tensor) and value.is_meta)
        }


def idle_parameters(setting: Setting, training: Training | None) -> dict[str, IdleParameter]:
    """The parameters that optimizers have and no plan updates so far, by key."""
    every = training.states if training is not None else ()
    known = {member.key for each in every for member in each.members}
    owners = {
        id(p): x.optimizer for x in every for g in x.optimizer.param_groups for p in g["params"]
    }
    return {
        key: IdleParameter(tensor, owners[id(tensor)])
        for key, tensor in named_variables(setting.model).items()
        if id(tensor) in owners and key not in known
    }


def idle_entry(
    setting: Setting, name: str, key: str, value: Tensor, parameter: Tensor
) -> SavedTensor:
    """A state that an optimizer holds, as an entry of a checkpoint.

    Args:
        name: in the checkpoint.
        key: of the program, as a variable would have it.
        value: of the state: global, or whole in every process.
        parameter: whose state it is.
    """
    shape, dtype = tuple(value.shape), dtype_name(value.dtype)
    if isinstance(value, GlobalTensor):
        parts = {rank: part.detach() for rank, part in parts_of(value).items()}
        return SavedTensor(name, key, shape, dtype, value.spec.layout, value.shares, parts)
    own = (
        parameter.spec.mesh.placement if isinstance(parameter, GlobalTensor) else setting.placement
    )
    ranks = setting.variables.keys() & own.coordinates.keys()
    parts = {rank: value.detach() for rank in ranks}
    return SavedTensor(name, key, shape, dtype, broadcast_layout(own), None, parts)


def idle_pieces(
    name: str, shape: tuple[int, ...], parameter: Tensor
) -> Iterator[tuple[int, tuple[Piece, ...]]]:
    """The pieces that each rank of this process holds of a state: laid like its parameter, whole in other shapes."""
    if not isinstance(parameter, GlobalTensor):
        whole: Region = tuple((0, size) for size in shape)
        yield 0, (Piece(whole, whole),)
        return
    entry = _like(name, shape, parameter)
    for rank in parameter.spec.mesh.ranks:
        yield rank, entry.pieces(rank)


def idle_state(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, parameter: Tensor, read: Read
) -> Tensor:
    """A state from a checkpoint, for an optimizer to hold: laid like its parameter, whole in another shape."""
    pieces = dict(idle_pieces(name, shape, parameter))
    if not isinstance(parameter, GlobalTensor):
        made = torch.empty(shape, dtype=dtype, device=parameter.device)
        read(name, pieces[0], made)
        return made
    entry, mesh = _like(name, shape, parameter), parameter.spec.mesh
    parts = []
    for rank in mesh.ranks:
        local = entry.layout.local_shape(shape, rank)
        parts.append(torch.empty(local, dtype=dtype, device=mesh.device_of(rank)))
        read(name, pieces[rank], parts[-1])
    spec = contiguous(mesh, entry.layout, shape, dtype)
    found: Tensor = stored_in(GlobalTensor(spec, tuple(parts)), entry.shares)
    return found


def _like(name: str, shape: tuple[int, ...], parameter: GlobalTensor) -> SavedTensor:
    """The entry of a state that lies like its parameter where it has that shape."""
    spec, same = parameter.spec, shape == tuple(parameter.shape)
    layout = spec.layout if same else broadcast_layout(spec.mesh.placement)
    return SavedTensor(name, name, shape, "", layout, parameter.shares if same else None, {})
