"""The grid of ranks that a step is planned on: what `--grid 16x8` says, or what the strategy lets be."""

from __future__ import annotations

import math
import re

from weft.errors import LayoutError, UserError
from weft.layout import Placement
from weft.strategy.strategy import Strategy

_GRID = re.compile(r"[1-9]\d{0,8}(x[1-9]\d{0,8})*")
MAX_RANKS = 1 << 20


def parse_grid(text: str) -> tuple[int, ...]:
    """The number of ranks along each axis, of "16x8".

    Raises:
        UserError: when it is something else.
    """
    if not _GRID.fullmatch(text):
        raise UserError(
            f"--grid takes the number of ranks along each axis, such as 8 or 16x8x128, found {text!r}"
        )
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
            f"the strategy's stages name their ranks, and no --grid stands beside them, found {_text(grid)}; leave it "
            "out, or give stages as a number"
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
