"""Mesh: a placement as this process sees it: its own ranks, their devices, channels to the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch

from weft.errors import InternalError
from weft.ir.plan import Communicator
from weft.layout import Placement
from weft.runtime.channel import Channel
from weft.runtime.distributed import current_world
from weft.runtime.world import LocalWorld, World


class Mesh:
    """A placement in a world.

    Attributes:
        placement: the placement.
        world: the world that it lies in.
        ranks: the ranks of the placement that live in this process, in the placement's order.
        device: what `GlobalTensor.device` says: the device of the first own rank.
        family: the meshes on which parts of one model lie, as stages do: their tensors may meet.
    """

    family: frozenset[Mesh] = frozenset()

    def __init__(self, world: World, placement: Placement) -> None:
        self.placement = placement
        self.world = world
        self.ranks = tuple(rank for rank in placement.ranks if rank in world.ranks)
        self.device = world.device((self.ranks or world.ranks)[0])
        if not self.in_process:
            groups = (group for axis in range(placement.axes) for group in placement.groups(axis))
            open_channels(world, [group for group in groups if len(group) > 1])

    @property
    def in_process(self) -> bool:
        """Whether all ranks of the placement live in this process, so that nothing has to be sent."""
        return len(self.ranks) == len(self.placement.ranks)

    def device_of(self, rank: int) -> torch.device:
        """The device of one of this process's ranks."""
        return self.world.device(rank)


# None where this process is not in the group.
_channels: WeakKeyDictionary[World, dict[tuple[int, ...], Channel | None]] = WeakKeyDictionary()
# By world; local worlds share theirs: all ranks live in this process, and tensors outlive the world
# they were made in.
_meshes: dict[tuple[World | None, Placement], Mesh] = {}


def mesh_of(placement: Placement) -> Mesh:
    """The mesh of a placement in the current world.

    Under torchrun the first call for a placement opens its communicators: all processes of the job
    must make it, in the same order.

    Raises:
        LayoutError: when the placement does not fit the world.
    """
    world = current_world(placement.device_type)
    world.check(placement)
    key = (None if isinstance(world, LocalWorld) else world, placement)
    if key not in _meshes:
        _meshes[key] = Mesh(world, placement)
    return _meshes[key]


def join_meshes(placements: Iterable[Placement]) -> None:
    """Let tensors on these placements meet in one op: parts of one model lie there."""
    family = frozenset(map(mesh_of, placements))
    if len(family) > 1:
        for mesh in family:
            mesh.family |= family
        global families
        families = True


# Whether there are any: few programs have them, and every op asks.
families = False


def open_channels(world: World, groups: Sequence[tuple[int, ...]]) -> None:
    """Open communicators between groups of ranks unless they are open; all processes must call it alike."""
    known = _channels.setdefault(world, {})
    new = [group for group in dict.fromkeys(groups) if group not in known]
    communicators = [Communicator(number, group) for number, group in enumerate(new)]
    opened = world.connect(communicators)[world.ranks[0]] if new else {}
    known.update({c.ranks: opened.get(c.id) for c in communicators})


def channel_between(world: World, group: tuple[int, ...]) -> Channel:
    """This process's end of an open communicator."""
    channel = _channels[world][group]
    if channel is None:
        raise InternalError(f"this process is not in the group {group}")
    return channel
