"""Costs on a topology: calls by the roofline of each device's kind, exchanges by the links between the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from weft.cached import cached_property
from weft.errors import UserError
from weft.hardware.collectives import (
    CollectiveLinks,
    TransferLinks,
    collective_seconds,
    transfer_seconds,
)
from weft.hardware.costs import Capacity, Contention, Cost, Groups, Sent
from weft.hardware.default_costs import is_launched
from weft.hardware.kinds.device_kinds import DeviceKind, device_kind
from weft.hardware.kinds.roofline import call_seconds, update_seconds, without_peak
from weft.hardware.topology.machine import Topology
from weft.ir.plan_nodes import CollectiveKind
from weft.ops import OpCall, has_rule, runs_whole
from weft.ops.weft_ops import WEFT_OPS
from weft.units import Bytes, Seconds


@final
@dataclass(frozen=True)
class TopologyCosts:
    """The seconds of calls, updates and exchanges on the devices of a topology: `weft.hardware.costs.Costs`.

    Attributes:
        topology: rank r runs on device r of it.
    """

    topology: Topology

    @cached_property
    def device_type(self) -> str:
        """The type of all its devices.

        Raises:
            UserError: when it has devices of several types.
        """
        names = {name for group in self.topology.groups for name in group.kind.kinds}
        found = sorted({device_kind(name).device_type for name in names})
        if len(found) > 1:
            raise UserError(
                f"the topology {self.topology.name} has devices of the types {' and '.join(found)}; a plan runs on "
                "devices of one type"
            )
        return found[0]

    @cached_property
    def _first(self) -> dict[str, int]:
        """For each kind the first rank that was asked for."""
        return {}

    def kind(self, rank: int) -> DeviceKind:
        """The kind of a rank's device."""
        return self.topology.kind(rank)

    def kinds(self, ranks: Sequence[int]) -> dict[int, int]:
        """For each rank the number of its device's kind, where they have several kinds; else nothing."""
        names = {name for group in self.topology.groups for name in group.kind.kinds}
        if len(names) == 1:
            return {}
        numbers: dict[str, int] = {}
        return {rank: numbers.setdefault(self.kind(rank).name, len(numbers)) for rank in ranks}

    def like(self, rank: int) -> int:
        return self._first.setdefault(self.kind(rank).name, rank)

    def capacity(self, rank: int) -> Capacity:
        kind = self.kind(rank)
        launched = is_launched(kind.device_type)
        return Capacity(
            kind.name,
            kind.peaks,
            kind.memory,
            kind.reserve,
            Contention(kind.slowdown),
            launched=launched,
        )

    def of_call(self, rank: int, call: OpCall, lies: Sequence[str] = ()) -> Cost:
        """One call; of an op without rule an estimate: it reads and writes its tensors once."""
        known = has_rule(call.op) or runs_whole(call.op) or call.op in WEFT_OPS
        if not known:
            missing = f"{call.op} has no rule: it reads and writes its tensors once"
            return Cost(call_seconds(self.kind(rank), call), estimate=missing)
        return Cost(
            call_seconds(self.kind(rank), call), estimate=without_peak(self.kind(rank), call)
        )

    def of_update(self, rank: int, rule: str, moved: Bytes, together: int = 1) -> Cost:
        return Cost(update_seconds(self.kind(rank), moved))

    def of_act(self, rank: int) -> Seconds:
        return self.kind(rank).act

    def of_collective(
        self, kind: CollectiveKind, size: Bytes, moved: Bytes, groups: Groups
    ) -> Cost:
        """A collective of all groups at the same time, over the links that they share."""
        every = tuple(tuple(group) for group in groups)
        seconds = collective_seconds(self.topology, kind, size, every)
        return Cost(seconds, links=CollectiveLinks(self.topology, kind, size, every))

    def of_transfer(self, sent: Sent, moved: Bytes) -> Cost:
        """A transfer between placements, over the links that its pieces share."""
        links = TransferLinks(self.topology, tuple(sent))
        return Cost(transfer_seconds(self.topology, sent), links=links)
