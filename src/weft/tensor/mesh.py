"""Mesh: a placement as this process sees it: its own ranks, their devices, channels to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final
from weakref import WeakKeyDictionary

import torch

from weft.errors import InternalError
from weft.ir.plan import Communicator
from weft.layout import Placement
from weft.runtime.channels.channel import Channel
from weft.runtime.world.distributed import current_world
from weft.runtime.world.world import LocalWorld, World


@final
class Mesh:
    """A placement in a world.

    Attributes:
        placement: the placement.
        world: the world that it lies in.
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
        """True where all ranks of the placement live in this process, so that nothing has to be sent."""
        return len(self.ranks) == len(self.placement.ranks)

    def at(self, placement: Placement) -> Mesh:
        """The mesh of a placement in the current world, of the same family where the placement belongs to it."""
        return mesh_of(placement, self.family if placement in self.family else frozenset())

    def same_job(self, other: Mesh) -> bool:
        """True where the ranks of both are the same processes; all local worlds live in this one."""
        return _job(self.world) is _job(other.world)

    def device_of(self, rank: int) -> torch.device:
        """The device of one of this process's ranks."""
        return self.world.device(rank)


# None where this process is not in the group.
_channels: WeakKeyDictionary[World, dict[tuple[int, ...], Channel | None]] = WeakKeyDictionary()
# By world and family; local worlds share theirs: all ranks live in this process, and tensors outlive
# the world they were made in.
_meshes: dict[tuple[World | None, Placement, frozenset[Placement]], Mesh] = {}

# Whether there are meshes with a family: few programs have them, and every op asks.
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
