"""The tensors of a program that a checkpoint holds, under the names of a single device, and which rank writes what.

States of parameters that no plan updates so far (frozen ones, or those of a branch not taken yet) are held by the
user's optimizer alone, whole or laid like their parameters, until a plan updates the parameter and takes them over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.compiler.training.gradients import FIRST_VALUES
from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Input, Value
from weft.ir.nodes import MASTER
from weft.layout import Layout, Shares, broadcast_layout
from weft.layout.layout import Region, region_size
from weft.ops.cost import dtype_name
from weft.program.agreement import gathered
from weft.program.checkpoint.files import Reading, slices
from weft.program.checkpoint.manifest import Manifest
from weft.program.checkpoint.values import to_json
from weft.program.live.ownership import named_variables
from weft.program.live.updated import agree
from weft.program.live.variables import parts_of, state_dict_names
from weft.program.setting import ProgramSetting
from weft.program.training.training import Training
from weft.tensor import GlobalTensor
from weft.tensor.dispatch.interleaved import stored_in
from weft.tensor.spec import contiguous
from weft.units import ITEM_SIZE

# How the names of tensors in a checkpoint begin.
MODEL, BUFFERS, MASTERS = "model.", "buffers.", "masters."
SCALE, STATE = "scale.", "optimizer.state."


@final
@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a program.

    Attributes:
        name: in the checkpoint; tied tensors have several. `key` is that of the program's variable.
        shape, dtype: whole shape, and dtype as text.
        shares: in which its parts are stored; None for the usual order.
        parts: of the ranks of this process that hold one.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    shares: Shares | None
    parts: Mapping[int, Tensor]

    @classmethod
    def of(cls, name: str, key: str, tensor: GlobalTensor) -> SavedTensor:
        """A global tensor as what is saved of it; in the shares in which its parts lie."""
        parts = {rank: part.detach() for rank, part in parts_of(tensor).items()}
        about = tuple(tensor.shape), dtype_name(tensor.dtype), tensor.spec.layout
        return cls(name, key, *about, tensor.shares, parts)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        return pieces_of(self.shape, self.layout, self.shares, rank)

    @property
    def bytes(self) -> int:
        """About the bytes of one rank's part."""
        ranks = self.layout.placement.ranks
        found = ITEM_SIZE.get(self.dtype, 8)
        for size in self.layout.local_shape(self.shape, ranks[0]):
            found *= size
        return found


def writers(entries: Iterable[SavedTensor]) -> dict[tuple[str, int], tuple[Piece, ...]]:
    """The pieces that each rank writes, by the name of an entry and the rank: each element of each entry once.

    Among ranks that hold the same piece, the one with least to write so far takes it; all processes find the same.
    """
    load: dict[int, int] = {}
    found: dict[tuple[str, int], tuple[Piece, ...]] = {}
    for entry in entries:
        alike: dict[tuple[Piece, ...], list[int]] = {}
        for rank in entry.layout.placement.ranks:
            alike.setdefault(entry.pieces(rank), []).append(rank)
        for pieces, ranks in alike.items():
            if pieces:
                least = min(ranks, key=lambda rank: (load.get(rank, 0), rank))
                load[least] = load.get(least, 0) + entry.bytes
                found[entry.name, least] = pieces
    return found


@final
@dataclass(frozen=True)
class Piece:
    """A box of a tensor: where it is in that, (offset, length) of each dimension, and in the part of a rank."""

    whole: Region
    local: Region


def pieces_of(
    shape: tuple[int, ...], layout: Layout, shares: Shares | None, rank: int
) -> tuple[Piece, ...]:
    """The pieces of a tensor of whole `shape` that a rank holds, none of them empty; its part is in `shares`."""
    region = layout.local_ranges(shape, rank)
    if not region_size(region):
        return ()
    local = tuple((0, length) for _, length in region)
    if shares is None:
        return (Piece(region, local),)
    dim = shares.dim
    return tuple(
        Piece(
            (*region[:dim], (place, length), *region[dim + 1 :]),
            (*local[:dim], (offset, length), *local[dim + 1 :]),
        )
        for place, offset, length in _runs(shares, *region[dim])
    )


def _runs(shares: Shares, start: int, length: int) -> Iterator[tuple[int, int, int]]:
    """The runs of a stretch of a dimension that is stored in shares: place as users know it, offset in it, length."""
    end, stored = start + length, 0
    begins = (0, *accumulate(shares.parts))
    for block in range(shares.blocks):
        for begin, part in zip(begins, shares.parts, strict=False):
            own = part // shares.blocks
            first, last = max(stored, start), min(stored + own, end)
            if first < last:
                yield begin + block * own + first - stored, first - start, last - first
            stored += own


@final
@dataclass(frozen=True)
class ProgramState:
    """The tensors and states of a program."""

    setting: ProgramSetting
    graph: LogicalGraph
    training: Training

    def variables(self) -> Iterator[SavedTensor]:
        """Parameters, buffers, FP32 main parameters and the loss scale; a tied tensor under each of its names."""
        names: dict[str, list[str]] = {}
        for name, key in state_dict_names(self.setting.model).items():
            names.setdefault(key, []).append(MODEL + name)
        for node in self.graph.of_kind(Input):
            if node.role in ("parameter", "buffer"):
                for name in names.get(node.key, [BUFFERS + node.key]):
                    yield self._entry(name, node.key, node.value, node.shares)
            elif node.role == "state" and node.key in FIRST_VALUES:
                yield self._entry(SCALE + node.key, node.key, node.value, node.shares)
        for node in self.training.masters.nodes.values():
            name = MASTERS + node.key.removesuffix(f".{MASTER}")
            yield self._entry(name, node.key, node.value, node.shares)

    def waiting(self) -> Iterator[SavedTensor]:
        """The FP32 main parameters of parameters that no plan updates so far, as a checkpoint had them."""
        waiting = self.training.masters.waiting
        for key, parameter in self.idle().items():
            if key in waiting:
                yield self._idle_entry(MASTERS + key, key, waiting[key], parameter.tensor)

    def states(self, kept: Mapping[str, Iterable[str]]) -> Iterator[SavedTensor]:
        """The states that ranks keep, or optimizers alone, as tensors; `kept` has their names, by parameter."""
        for key, states, shares in self.stated():
            for name in kept.get(key, ()):
                own = f"{key}.{name}"
                yield self._entry(STATE + own, own, states[name], shares.get(name))
        for key, parameter in self.idle().items():
            for name in kept.get(key, ()):
                own, value = f"{key}.{name}", parameter.states[name]
                yield self._idle_entry(STATE + own, own, value, parameter.tensor)

    def idle(self) -> dict[str, IdleParameter]:
        """The parameters that optimizers have and no plan updates so far, by key."""
        every = self.training.states
        known = {member.key for each in every for member in each.members}
        owners = {
            id(p): x.optimizer for x in every for g in x.optimizer.param_groups for p in g["params"]
        }
        return {
            key: IdleParameter(tensor, owners[id(tensor)])
            for key, tensor in named_variables(self.setting.model).items()
            if id(tensor) in owners and key not in known
        }

    def stated(self) -> Iterator[tuple[str, Mapping[str, Value], Mapping[str, Shares]]]:
        """Each parameter that is updated, with what its update keeps, and in which shares."""
        for each in self.training.states:
            for member in each.members:
                yield member.key, member.states, member.shares

    def kept(self) -> tuple[dict[str, list[str]], dict[str, Any]]:
        """By parameter, the names of states that are tensors, and the other states as JSON. Collective.

        Raises UserError where two ranks keep something else of a parameter.
        """
        optimizers = self.training.optimizers.each
        agree(optimizers)
        texts = gathered(
            self.setting.world, "what is kept", lambda: json.dumps(self._held(optimizers))
        )
        merged: dict[str, Any] = {}
        for rank, text in enumerate(texts):
            for key, each in json.loads(text).items():
                if merged.setdefault(key, each) != each:
                    raise UserError(
                        f"{STATE}{key} is {merged[key]} on a rank and {each} on rank {rank}; every rank must give the "
                        "states of optimizers alike"
                    )
        tensors = {key: each[0] for key, each in merged.items()}
        return tensors, {key: each[1] for key, each in merged.items() if each[1]}

    def _held(self, optimizers: Sequence[Optimizer]) -> dict[str, tuple[list[str], Any]]:
        """By parameter, what optimizers hold: names of states that are tensors, and the others as JSON."""
        found: dict[str, tuple[list[str], Any]] = {}
        for key, parameter in named_variables(self.setting.model).items():
            for held in (each.state.get(parameter) or {} for each in optimizers):
                known = {n: x for n, x in held.items() if not (isinstance(x, Tensor) and x.is_meta)}
                if any(x is not None for x in known.values()):  # others begin again
                    tensors = [name for name, x in known.items() if isinstance(x, Tensor)]
                    others = {name: x for name, x in known.items() if name not in tensors}
                    found[key] = tensors, to_json(others, STATE + key, {})
        return found

    def _entry(self, name: str, key: str, value: Value, shares: Shares | None) -> SavedTensor:
        own, layout = self.setting.variables, value.laid
        parts = {
            rank: own[rank][key].detach()
            for rank in own.keys() & layout.placement.coordinates.keys()
            if key in own[rank]
        }
        return SavedTensor(name, key, value.shape, value.dtype, layout, shares, parts)

    def _idle_entry(self, name: str, key: str, value: Tensor, parameter: Tensor) -> SavedTensor:
        """A state that an optimizer holds: global, or whole in every process; `key` as a variable would have it."""
        if isinstance(value, GlobalTensor):
            return SavedTensor.of(name, key, value)
        shape, dtype = tuple(value.shape), dtype_name(value.dtype)
        placement = self.setting.placement
        if isinstance(parameter, GlobalTensor):
            placement = parameter.spec.mesh.placement
        ranks = self.setting.variables.keys() & placement.coordinates.keys()
        parts = {rank: value.detach() for rank in ranks}
        return SavedTensor(name, key, shape, dtype, broadcast_layout(placement), None, parts)


@final
class IdleParameter(NamedTuple):
    """A parameter that an optimizer has and no plan updates so far."""

    tensor: Tensor
    optimizer: Optimizer

    @property
    def states(self) -> Mapping[str, Any]:
        """The states that the optimizer holds for it, with values."""
        found = self.optimizer.state.get(self.tensor) or {}
        return {
            name: value
            for name, value in found.items()
            if value is not None and not (isinstance(value, Tensor) and value.is_meta)
        }


# Reads pieces of a tensor of the checkpoint into the part of a rank.
Read: TypeAlias = Callable[[str, Sequence[Piece], Tensor], None]


def read_by(manifest: Manifest, reading: Reading) -> Read:
    """Reads from the files of a checkpoint."""

    def read(source: str, pieces: Sequence[Piece], part: Tensor) -> None:
        for piece in pieces:
            extents = manifest.tensors[source].extents
            reading.piece(extents, piece.whole, part[slices(piece.local)])

    return read


def read_like(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, read: Read
) -> Tensor:
    """A tensor of a checkpoint: laid like another one that has its shape, whole where that has another shape."""
    if not isinstance(like, GlobalTensor):
        made = torch.empty(shape, dtype=dtype, device=like.device)
        whole = tuple((0, size) for size in shape)
        read(name, (Piece(whole, whole),), made)
        return made
    mesh, same = like.spec.mesh, shape == tuple(like.shape)
    layout = like.spec.layout if same else broadcast_layout(mesh.placement)
    shares = like.shares if same else None
    parts = []
    for rank in mesh.ranks:
        local = layout.local_shape(shape, rank)
        parts.append(torch.empty(local, dtype=dtype, device=mesh.device_of(rank)))
        read(name, pieces_of(shape, layout, shares, rank), parts[-1])
    spec = contiguous(mesh, layout, shape, dtype)
    found: Tensor = stored_in(GlobalTensor(spec, tuple(parts)), shares)
    return found
