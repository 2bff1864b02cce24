"""The machine that a step is planned and simulated for: a topology, or the one at hand as it was measured."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from weft.cached import cached_property
from weft.errors import UserError
from weft.hardware.costs import Costs
from weft.hardware.here import cores, kept_here, load_here
from weft.hardware.topology import Topology, topology
from weft.hardware.topology_costs import TopologyCosts
from weft.hardware.usual.device_type import DEVICE_TYPES

HERE = "here"
_HERE = re.compile(rf"{HERE}(x(?P<ranks>\d{{1,6}}))?")


@final
@dataclass(frozen=True)
class Machine:
    """A machine with as many devices as there may be ranks; rank r runs on device r.

    Attributes:
        costs: of what runs there.
        planned: the costs that plans are made with: what was measured is settled.
        devices: how many there are.
        device_type: of all of them.
        limit: bytes that a rank may take, with what its device reserves; None for what its device has.
    """

    costs: Costs
    planned: Costs
    devices: int
    device_type: str
    limit: int | None = None

    @cached_property
    def fingerprint(self) -> str:
        """The checksum of its costs: equal machines have equal ones.

        And of the limit, where devices have unlike memory: by it what ranks hold is compared.
        """
        text = f"{self.devices} {self.device_type} {self.costs!r} {self.planned!r}"
        if self.limit is not None and len(set(self._memory)) > 1:
            text += f" {self.limit}"
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _memory(self) -> tuple[int | None, ...]:
        """Bytes of each device; None where that is not known."""
        return tuple(self.costs.capacity(rank).memory for rank in range(self.devices))

    @cached_property
    def least_limit(self) -> int | None:
        """Bytes that the rank may take which may take the fewest; None where no rank has a limit that is known."""
        if self.limit is not None:
            return self.limit
        return min((each for each in self._memory if each is not None), default=None)

    def limit_of(self, rank: int) -> int:
        """Bytes that a rank may take; the fewest of all where that is not known, 0 where nothing is."""
        own = self._memory[rank] if self.limit is None else self.limit
        return own or self.least_limit or 0

    def kinds(self, ranks: Sequence[int]) -> dict[int, int]:
        """For each rank the number of its device's kind, where they have several kinds; else nothing."""
        return self.costs.kinds(ranks) if isinstance(self.costs, TopologyCosts) else {}


def machine_of(what: str | Path | Topology | Machine, ranks: int | None = None) -> Machine:
    """A machine by its name, from a file, or as it is.

    Args:
        what: a name of the catalogue ("h100x512"), a `.yaml` file, or a topology; "here" for the machine at hand,
            "herex4" with 4 ranks at work. A machine stands for itself.
        ranks: that "here" has at work where `what` does not say; by default one for each core.

    Raises:
        UserError: there is none of that name, the file is none, or this machine was not measured.
    """
    if isinstance(what, Machine):
        return what
    named = _HERE.fullmatch(what) if isinstance(what, str) else None
    if named is not None:
        return _here(int(named["ranks"]) if named["ranks"] else ranks or cores())
    costs = TopologyCosts(topology(what))
    return Machine(costs, costs, len(costs.topology), costs.device_type)


def _here(ranks: int) -> Machine:
    if ranks < 1:
        raise UserError(f"{HERE}x{ranks} has no rank; give a number from 1, such as {HERE}x2")
    for device_type in DEVICE_TYPES:
        if kept_here(device_type):
            costs = load_here(ranks, device_type)
            assert costs is not None  # something is kept
            planned = load_here(ranks, device_type, planned=True)
            return Machine(costs, planned or costs, ranks, device_type)
    raise UserError(
        "this machine was not measured: run `weft measure` on it, or give a topology of the catalogue, such as h100x8, "
        "or a .yaml file, in place of here"
    )
