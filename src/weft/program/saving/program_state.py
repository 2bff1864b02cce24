"""The tensors and states of a program, as entries of a checkpoint.

States of parameters that no plan updates so far (frozen ones, or those of a branch not taken yet) are held by the
user's optimizer alone, whole or laid like their parameters, until a plan updates the parameter and takes them over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.compiler.training.gradients import FIRST_VALUES
from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Input, Value
from weft.ir.nodes import MASTER
from weft.layout import Shares, broadcast_layout
from weft.layout.layout import Region
from weft.ops.cost import dtype_name
from weft.program.agreement import gathered
from weft.program.live.optimizer_state import agree
from weft.program.live.ownership import named_variables
from weft.program.live.sharded_values import parts_of
from weft.program.live.variables import state_dict_names
from weft.program.saving.saved_tensors import Piece, SavedTensor
from weft.program.saving.values import to_json
from weft.program.setting import Setting
from weft.program.training.training import Training
from weft.tensor import GlobalTensor
from weft.tensor.dispatch.interleaved import stored_in
from weft.tensor.spec import contiguous

MODEL, BUFFERS, MASTERS, SCALE, STATE = (
    "model.",
    "buffers.",
    "masters.",
    "scale.",
    "optimizer.state.",
)


@final
@dataclass(frozen=True)
class ProgramState:
    """The tensors and states of a program.

    Attributes:
        training: the training part; None in evaluation.
    """

    setting: Setting
    graph: LogicalGraph
    training: Training | None

    def variables(self) -> Iterator[SavedTensor]:
        """Parameters, buffers, masters and the loss scale; a tied tensor under each of its names."""
        names: dict[str, list[str]] = {}
        for name, key in state_dict_names(self.setting.model).items():
            names.setdefault(key, []).append(name)
        for node in self.graph.of_kind(Input):
            if node.role in ("parameter", "buffer"):
                every = [MODEL + name for name in names.get(node.key, ())]
                for name in every or [BUFFERS + node.key]:
                    yield self._entry(name, node.key, node.value, node.shares)
            elif node.role == "state" and node.key in FIRST_VALUES:
                yield self._entry(SCALE + node.key, node.key, node.value, node.shares)
        for node in self._masters():
            name = MASTERS + node.key.removesuffix(f".{MASTER}")
            yield self._entry(name, node.key, node.value, node.shares)

    def _masters(self) -> Iterable[Input]:
        """The masters of all plans that ran so far, which others of the program have no place for."""
        if self.training is not None:
            return self.training.masters.nodes.values()
        nodes = self.graph.of_kind(Input)
        return [x for x in nodes if x.role == "state" and x.key.endswith(f".{MASTER}")]

    def waiting(self) -> Iterator[SavedTensor]:
        """The masters of parameters that no plan updates so far, as a checkpoint had them."""
        masters = self.training.masters if self.training is not None else None
        for key, parameter in self.idle().items() if masters is not None else ():
            if masters is not None and key in masters.waiting:
                value = masters.waiting[key]
                yield idle_entry(self.setting, MASTERS + key, key, value, parameter.tensor)

    def states(self, kept: Mapping[str, Iterable[str]]) -> Iterator[SavedTensor]:
        """The states of the optimizers that ranks keep, or optimizers alone, as tensors.

        Args:
            kept: by parameter, the names of the states.
        """
        for key, states, shares in self.stated():
            for name in kept.get(key, ()):
                own = f"{key}.{name}"
                yield self._entry(STATE + own, own, states[name], shares.get(name))
        for key, parameter in self.idle().items():
            for name in kept.get(key, ()):
                own, value = f"{key}.{name}", parameter.states[name]
                yield idle_entry(self.setting, STATE + own, own, value, parameter.tensor)

    def idle(self) -> dict[str, IdleParameter]:
        """The parameters that optimizers have and no plan updates so far, by key."""
        return idle_parameters(self.setting, self.training)

    def stated(self) -> Iterator[tuple[str, Mapping[str, Value], Mapping[str, Shares]]]:
        """Each parameter that is updated, with what its update keeps, and in which shares."""
        for each in self.training.states if self.training is not None else ():
            for member in each.members:
                yield member.key, member.states, member.shares

    def kept(self) -> tuple[dict[str, list[str]], dict[str, Any]]:
        """By parameter, the names of the states that are tensors, and those that are none, as JSON. Collective."""
        optimizers = [each.optimizer for each in self.training.states] if self.training else []
        agree(optimizers)
        texts = gathered(
            self.setting.world, "what is kept", lambda: json.dumps(self._held(optimizers))
        )
        merged = merged_alike(map(json.loads, texts))
        tensors = {key: each[0] for key, each in merged.items()}
        return tensors, {key: each[1] for key, each in merged.items() if each[1]}

    def _held(self, optimizers: Sequence[Optimizer]) -> dict[str, tuple[list[str], Any]]:
        """By parameter, what optimizers hold: names of states that are tensors, and the others as JSON."""
        found: dict[str, tuple[list[str], Any]] = {}
        for key, parameter in named_variables(self.setting.model).items():
            for held in (each.state.get(parameter) or {} for each in optimizers):
                known = {n: x for n, x in held.items() if not (isinstance(x, Tensor) and x.is_meta)}
                if any(x is not None for x in known.values()):  # others begin anew
                    tensors = [name for name, x in known.items() if isinstance(x, Tensor)]
                    others = {name: x for name, x in known.items() if name not in tensors}
                    found[key] = tensors, to_json(others, STATE + key, {})
        return found

    def _entry(self, name: str, key: str, value: Value, shares: Shares | None) -> SavedTensor:
        layout = value.layout
        assert layout is not None  # all values of a compiled graph have one
        own = self.setting.variables
        parts = {
            rank: own[rank][key].detach()
            for rank in own.keys() & layout.placement.coordinates.keys()
            if key in own[rank]
        }
        return SavedTensor(name, key, value.shape, value.dtype, layout, shares, parts)


def merged_alike(every: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All that ranks keep, by parameter.

    Raises:
        UserError: two ranks keep something else of one.
    """
    merged: dict[str, Any] = {}
    for rank, own in enumerate(every):
        for key, each in own.items():
            if merged.setdefault(key, each) != each:
                raise UserError(
                    f"{STATE}{key} is {merged[key]} on a rank and {each} on rank {rank}; every rank must give the "
                    "states of optimizers alike"
                )
    return merged


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
