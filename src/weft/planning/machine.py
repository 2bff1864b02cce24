"""The machine that a step is planned for: a topology, or this one as measured; and the grid of its ranks."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from weft.cached import cached_property
from weft.errors import LayoutError, UserError, wrong
from weft.hardware.costs import DEVICE_TYPES, Costs
from weft.hardware.measured_store import cores, load_measurements, stored_measurements
from weft.hardware.planning_costs import TopologyCosts
from weft.hardware.topology import Topology
from weft.hardware.topology_files import topology
from weft.layout import Placement
from weft.strategy.strategy import Strategy

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
        """Bytes of each device; None if that is not known."""
        return tuple(self.costs.capacity(rank).memory for rank in range(self.devices))

    @cached_property
    def least_limit(self) -> int | None:
        """Bytes that the rank may take which may take the fewest; None if no rank has a limit that is known."""
        if self.limit is not None:
            return self.limit
        return min((each for each in self._memory if each is not None), default=None)

    def limit_of(self, rank: int) -> int:
        """Bytes that a rank may take; the fewest of all where that is not known, 0 if nothing is."""
        own = self._memory[rank] if self.limit is None else self.limit
        return own or self.least_limit or 0

    def kinds(self, ranks: Sequence[int]) -> dict[int, int]:
        """For each rank the number of its device's kind, where they have several kinds; else nothing."""
        return self.costs.kinds(ranks) if isinstance(self.costs, TopologyCosts) else {}


def machine_of(what: str | Path | Topology | Machine, ranks: int | None = None) -> Machine:
    """A machine by its name, from a file, or as it is.

    Args:
        what: a name of the catalogue ("h100x512"), a `.yaml` file, or a topology; "here" for this machine,
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
        if stored_measurements(device_type):
            costs = load_measurements(ranks, device_type)
            assert costs is not None  # something is kept
            planned = load_measurements(ranks, device_type, planned=True)
            return Machine(costs, planned or costs, ranks, device_type)
    raise UserError(
        "this machine was not measured: run `weft measure` on it, or give a topology of the catalogue, such as h100x8, "
        "or a .yaml file, in place of here"
    )


_GRID = re.compile(r"[1-9]\d{0,8}(x[1-9]\d{0,8})*")
MAX_RANKS = 1 << 20


def parse_grid(text: str) -> tuple[int, ...]:
    """The number of ranks along each axis, of "16x8".

    Raises:
        UserError: when it is something else.
    """
    if not _GRID.fullmatch(text):
        raise wrong("--grid", "the number of ranks along each axis, such as 8 or 16x8x128", text)
    grid = tuple(map(int, text.split("x")))
    if math.prod(grid) > MAX_RANKS:
        raise UserError(
            f"--grid {text} has {math.prod(grid)} ranks; weft plans {MAX_RANKS} at most"
        )
    return grid


def placement_on(
    device_type: str, devices: int, strategy: Strategy, grid: tuple[int, ...] = ()
) -> Placement:
    """All ranks of a plan on so many devices; rank r runs on device r.

    With stages that name their ranks, the placement of all of them. Else ranks 0, 1, … in the order of rows of `grid`,
    the last axis innermost; a number of stages cuts its first axis. Without a grid that of the strategy; without
    that, one axis of all devices, and a first one of the stages where they are a number.

    Args:
        device_type: of the devices.
        devices: how many there are.
        strategy: the user's.
        grid: the number of ranks along each axis; () for none given.

    Raises:
        UserError: there are more ranks than devices, or stages do not divide them.
        LayoutError: a grid beside stages that name their ranks.
    """
    if not isinstance(strategy.stages, int) and strategy.stages:
        return _of_stages(device_type, devices, strategy, grid)
    shape = grid or tuple(strategy.grid) or _usual_grid(devices, strategy)
    ranks = math.prod(shape)
    if ranks > devices:
        raise UserError(
            f"the grid {_text(shape)} has {ranks} ranks, the topology has {devices} devices; give a smaller grid or a "
            "larger topology"
        )
    return Placement(device_type, shape, tuple(range(ranks)))


def _of_stages(
    device_type: str, devices: int, strategy: Strategy, grid: tuple[int, ...]
) -> Placement:
    assert not isinstance(strategy.stages, int)
    if grid:
        raise LayoutError(
            f"the strategy's stages name their ranks, so --grid must be left out, got {_text(grid)}; or give "
            "stages as a number"
        )
    ranks = tuple(sorted({rank for stage in strategy.stages for rank in stage.placement.ranks}))
    for number, stage in enumerate(strategy.stages):
        if stage.placement.device_type != device_type:
            raise LayoutError(
                f"stage {number} of the strategy runs on {stage.placement.device_type!r}, the topology's devices are "
                f"{device_type!r}; name that in the stages"
            )
    if ranks[-1] >= devices:
        raise UserError(
            f"the strategy's stages name rank {ranks[-1]}, the topology has the {devices} devices 0 to {devices - 1}; "
            "give a larger topology"
        )
    return Placement(device_type, (len(ranks),), ranks)


def _usual_grid(devices: int, strategy: Strategy) -> tuple[int, ...]:
    stages = strategy.stages if isinstance(strategy.stages, int) else 1
    if stages > devices:
        raise UserError(
            f"{stages} stages are more than {devices} devices; give fewer stages or a larger topology"
        )
    if stages > 1 and devices % stages:
        raise UserError(
            f"{stages} stages do not divide {devices} devices; say with --grid which part of them to use, such as "
            f"--grid {stages}x{devices // stages}"
        )
    return (stages, devices // stages) if stages > 1 else (devices,)


def _text(grid: tuple[int, ...]) -> str:
    return "x".join(map(str, grid))
