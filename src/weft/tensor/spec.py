"""Spec: everything about a global tensor but its data, equal specs are one object; the mesh; checks of arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from weft.errors import InternalError, LayoutError, UserError, WeftError, is_whole, shown, wrong
from weft.ir.plan import Communicator
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split
from weft.ops import TensorSpec
from weft.ops.cost import dtype_name
from weft.runtime.channels.channel import Channel
from weft.runtime.world.distributed import current_world
from weft.runtime.world.world import LocalWorld, World


@final
@dataclass(frozen=True, eq=False)
class Spec:
    """Shape, strides and dtype of the whole tensor, and where it is; compared by identity."""

    mesh: Mesh
    layout: Layout
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def tensor(self) -> TensorSpec:
        """The tensor as sharding rules see it."""
        return TensorSpec(self.shape, dtype_name(self.dtype))

    def with_layout(self, layout: Layout, mesh: Mesh | None = None) -> Spec:
        """The same tensor in another layout."""
        return intern(mesh or self.mesh, layout, self.shape, self.strides, self.dtype)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)} as {self.layout}"


# As long as anybody holds them.
_specs: WeakValueDictionary[tuple[object, ...], Spec] = WeakValueDictionary()


def intern(
    mesh: Mesh,
    layout: Layout,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
) -> Spec:
    """The one spec with these values."""
    key = (mesh, layout, tuple(shape), tuple(strides), dtype)
    found = _specs.get(key)
    return _specs.setdefault(key, Spec(*key)) if found is None else found


def contiguous(mesh: Mesh, layout: Layout, shape: Sequence[int], dtype: torch.dtype) -> Spec:
    """The spec of a row-major tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return intern(mesh, layout, shape, strides[::-1] if shape else (), dtype)


def layout_for(
    placement: Placement, sbp: SBP | Sequence[SBP], shape: Sequence[int], what: str
) -> Layout:
    """The layout that a user's `sbp=` means for a tensor of `shape`: one SBP stands for every axis.

    Raises:
        LayoutError: when it is no SBP, a wrong number of them, or splits a dimension that is not
            there.
    """
    checked_placement(placement, what)
    every = tuple(sbp) if isinstance(sbp, Sequence) else (sbp,) * placement.axes
    if not all(isinstance(part, Split | Broadcast | Partial) for part in every):
        expected = (
            "weft.split(dim), weft.broadcast, weft.partial(), or one of them for each of the "
            f"{placement.axes} axes of {placement}"
        )
        raise wrong(f"{what}: sbp=", expected, sbp, LayoutError)
    rank = len(shape)
    every = tuple(
        Split(x.dim + rank) if isinstance(x, Split) and -rank <= x.dim < 0 else x for x in every
    )
    layout = Layout(placement, every)
    layout.check(tuple(shape))
    return layout


def without_partials(layout: Layout) -> Layout:
    """The layout with Broadcast in place of every Partial: how values are made before they are boxed."""
    every = (Broadcast() if isinstance(sbp, Partial) else sbp for sbp in layout.sbp)
    return Layout(layout.placement, tuple(every))


@final
class Mesh:
    """A placement in a world.

    Attributes:
        ranks: the ranks of the placement that live in this process, in the placement's order.
        device: what `GlobalTensor.device` says: the device of the first own rank.
        family: where the tensors lie that may meet those of this mesh in one op: the placements of one
            model's parts, as its stages have them. Empty for tensors of no such model.
    """

    def __init__(
        self, world: World, placement: Placement, family: frozenset[Placement] = frozenset()
    ) -> None:
        self.placement = placement
        self.world = world
        self.family = family
        self.ranks = tuple(rank for rank in placement.ranks if rank in world.ranks)
        self.device = world.device((self.ranks or world.ranks)[0])
        if not self.in_process:
            groups = (group for axis in range(placement.axes) for group in placement.groups(axis))
            open_channels(world, [group for group in groups if len(group) > 1])

    @property
    def in_process(self) -> bool:
        """True if all ranks of the placement live in this process, so that nothing has to be sent."""
        return len(self.ranks) == len(self.placement.ranks)

    def at(self, placement: Placement) -> Mesh:
        """The mesh of a placement in the current world, of the same family where the placement belongs to it."""
        return mesh_of(placement, self.family if placement in self.family else frozenset())

    def same_job(self, other: Mesh) -> bool:
        """True if the ranks of both are the same processes; all local worlds live in this one."""
        return _job(self.world) is _job(other.world)

    def device_of(self, rank: int) -> torch.device:
        """The device of one of this process's ranks."""
        return self.world.device(rank)


# None where this process is not in the group.
_channels: WeakKeyDictionary[World, dict[tuple[int, ...], Channel | None]] = WeakKeyDictionary()
# By world and family; local worlds share theirs: all ranks live in this process, and tensors outlive
# the world they were made in.
_meshes: dict[tuple[World | None, Placement, frozenset[Placement]], Mesh] = {}

# True if there are meshes with a family: few programs have them, and every op asks.
families = False


def mesh_of(placement: Placement, family: frozenset[Placement] = frozenset()) -> Mesh:
    """The mesh of a placement in the current world.

    Under torchrun the first call for a placement opens its communicators: all processes of the job
    must make it, in the same order.

    Args:
        family: the placements of the model that the tensors belong to, where it has several.

    Raises:
        LayoutError: when the placement does not fit the world.
    """
    global families
    world = current_world(placement.device_type)
    world.check(placement)
    key = (_job(world), placement, family)
    if key not in _meshes:
        _meshes[key] = Mesh(world, placement, family)
        families = families or bool(family)
    return _meshes[key]


def _job(world: World) -> World | None:
    return None if isinstance(world, LocalWorld) else world


def open_channels(world: World, groups: Sequence[tuple[int, ...]]) -> None:
    """Open communicators between groups of ranks unless they are open; all processes must call it alike.

    Raises:
        RankFailure: another process opens others, or makes another call.
        UserError: in a process that was forked from the one that has the ranks.
    """
    known = _channels.setdefault(world, {})
    new = [group for group in dict.fromkeys(groups) if group not in known]
    if not new:
        return
    world.check_process()
    text = ", ".join(map(str, new))
    world.calls.enter(f"the first use of global tensors on the ranks {text}")
    world.check_same(dict.fromkeys(world.ranks, text), "the placements of global tensors")
    communicators = [Communicator(number, group) for number, group in enumerate(new)]
    opened = world.connect(communicators)[world.ranks[0]]
    known.update({c.ranks: opened.get(c.id) for c in communicators})


def channel_between(world: World, group: tuple[int, ...]) -> Channel:
    """This process's end of an open communicator."""
    channel = _channels[world][group]
    if channel is None:
        raise InternalError(f"this process is not in the group {group}")
    return channel


# Elements that torch can count.
_MOST = 2**63 - 1


def checked_placement(placement: object, what: str) -> Placement:
    """The placement itself; raises LayoutError for anything else."""
    if not isinstance(placement, Placement):
        expected = 'weft.placement("cpu", [0, 1]) or the like'
        raise wrong(f"{what}: placement=", expected, placement, LayoutError)
    return placement


def checked_size(size: object, what: str) -> tuple[int, ...]:
    """The shape of a whole tensor as a tuple; raises UserError for anything else."""
    sizes = tuple(size) if isinstance(size, list | tuple | range) else None
    if sizes is None or not all(is_whole(each, 0) for each in sizes):
        raise wrong(what, "whole numbers from 0 as the shape", size)
    if prod(sizes) > _MOST or any(each > _MOST for each in sizes):
        raise UserError(
            f"{what}: no tensor has the shape {shown(size)}; give one of at most {_MOST} elements"
        )
    return sizes


def checked_dtype(dtype: object, what: str) -> torch.dtype | None:
    """The dtype, or None; raises UserError for anything else."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise wrong(f"{what}: dtype=", "a torch.dtype or None", dtype)
    return dtype


def checked_number(value: object, what: str) -> Any:
    """A number that a tensor can hold; raises UserError for anything else."""
    if not isinstance(value, bool | int | float | complex) or (
        isinstance(value, int) and not -_MOST - 1 <= value <= _MOST
    ):
        raise wrong(what, "a number", value)
    return value


def check_gradient(requires_grad: object, dtype: torch.dtype | None, what: str) -> None:
    """Check that `requires_grad` is True or False, and that a tensor of this dtype may have a gradient.

    Raises:
        UserError: when it is not.
    """
    if not isinstance(requires_grad, bool):
        raise wrong(f"{what}: requires_grad=", "True or False", requires_grad)
    if requires_grad and dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise UserError(
            f"{what}: only floating-point tensors have gradients, got dtype {dtype}; give another dtype="
        )


@contextmanager
def refused_call(what: str, found: object) -> Iterator[None]:
    """Say of torch's error which call it refuses, and what it was given."""
    try:
        yield
    except WeftError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError, NotImplementedError) as error:
        text = str(error).partition("\n")[0]
        raise UserError(f"{what}: {shown(found)}: {text}") from error


def sizes_of(size: Sequence[Any]) -> Any:
    """`f(2, 3)` and `f((2, 3))` mean the same."""
    return size[0] if len(size) == 1 and not isinstance(size[0], int) else size
