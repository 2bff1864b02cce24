"""CollectiveLinks and TransferLinks: the links that communications need, worked out when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from weft.hardware.collectives.group_set import Groups
from weft.hardware.collectives.pattern import BusyLinks
from weft.hardware.collectives.seconds import collective_links, transfer_links
from weft.hardware.topology.machine import Topology
from weft.ir.plan_nodes import CollectiveKind
from weft.units import Bytes


@final
@dataclass(frozen=True)
class CollectiveLinks:
    """The links of a collective of all groups at the same time; arguments as of `collective_seconds`."""

    topology: Topology = field(repr=False, hash=False)
    kind: CollectiveKind
    size: Bytes
    groups: Groups

    def busy(self) -> BusyLinks:
        """Numbers of resources, and seconds in which the collective needs each of them whole."""
        return collective_links(self.topology, self.kind, self.size, self.groups)


@final
@dataclass(frozen=True)
class TransferLinks:
    """The links of pieces (from, to, bytes) that are sent at the same time."""

    topology: Topology = field(repr=False, hash=False)
    pieces: tuple[tuple[int, int, Bytes], ...]

    def busy(self) -> BusyLinks:
        """Numbers of resources, and seconds in which the pieces need each of them whole."""
        return transfer_links(self.topology, self.pieces)
