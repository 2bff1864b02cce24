"""Placement: a device type and an n-D grid of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, final

from weft.cached import cached_property
from weft.errors import LayoutError, shown, wrong

# The device types that a placement may name; what plans know of each: `weft.hardware.costs`.
DEVICE_NAMES = ("cpu", "cuda")
# Ranks and axes of a grid, at most; far above any machine.
MOST_RANKS, MOST_AXES = 1 << 20, 32


@final
@dataclass(frozen=True)
class Placement:
    """A grid of ranks on which a tensor or an op lives.

    Attributes:
        device_type: "cpu" or "cuda".
        shape: number of ranks along each axis of the grid.
        ranks: the ranks in row-major order; all different.
    """

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        check_device_name(self.device_type)
        for name in ("shape", "ranks"):
            numbers = getattr(self, name)
            if not isinstance(numbers, tuple) or not all(type(one) is int for one in numbers):
                expected = "a tuple of whole numbers"
                remedy = "weft.placement takes nested lists"
                raise wrong(
                    f"weft.Placement({name}=…)", expected, numbers, LayoutError, remedy=remedy
                )
        if not self.shape or any(size < 1 for size in self.shape):
            raise LayoutError(
                f"a placement needs at least one axis and one rank on each, got shape {self.shape}; give "
                "ranks such as [0, 1]"
            )
        if math.prod(self.shape) != len(self.ranks):
            raise LayoutError(
                f"a grid of shape {self.shape} needs {math.prod(self.shape)} ranks, got {self.ranks}; give one for "
                "each place of the grid"
            )
        if len(set(self.ranks)) != len(self.ranks):
            raise LayoutError(
                f"a rank is twice in the placement {self.grid}; give each place a different rank"
            )
        if any(rank < 0 for rank in self.ranks):
            raise LayoutError(f"ranks count from 0, got {self.grid}; give none below 0")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Layouts are looked up all the time, and a job may have a thousand ranks."""
        return hash((self.shape, self.ranks))

    @property
    def axes(self) -> int:
        """Number of axes of the grid."""
        return len(self.shape)

    @cached_property
    def grid(self) -> list[Any]:
        """The ranks as nested lists, one level for each axis."""
        return _nest(self.ranks, self.shape)

    @cached_property
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """The position of each rank on the grid."""
        positions = product(*(range(size) for size in self.shape))
        return dict(zip(self.ranks, positions, strict=True))

    def group(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axis`, in the order of the grid."""
        here = self.coordinates[rank]
        apart = math.prod(self.shape[axis + 1 :])
        first = sum(
            place * math.prod(self.shape[other + 1 :])
            for other, place in enumerate(here)
            if other != axis
        )
        return self.ranks[first : first + apart * self.shape[axis] : apart]

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """All groups along `axis`, each once, ordered by their first rank's position."""
        apart = math.prod(self.shape[axis + 1 :])
        block = apart * self.shape[axis]
        return tuple(
            [
                self.ranks[first : corner + block : apart]
                for corner in range(0, len(self.ranks), block)
                for first in range(corner, corner + apart)
            ]
        )

    def __str__(self) -> str:
        return f"{self.device_type} {self.grid}"


def placement(device_type: str, ranks: Sequence[Any]) -> Placement:
    """Build a placement from nested lists of ranks.

    Args:
        device_type: "cpu" or "cuda".
        ranks: `[0, 1]` for one axis, `[[0, 1], [2, 3]]` for two, and so on.

    Raises:
        LayoutError: when the lists are ragged, empty, or name a rank twice.
    """
    check_device_name(device_type)
    shape = _shape(ranks)
    return Placement(device_type, shape, tuple(_flatten(ranks, len(shape))))


def check_device_name(device_type: object) -> None:
    """Check that a device type is one that there is.

    Raises:
        LayoutError: naming those that there are.
    """
    if not isinstance(device_type, str) or device_type not in DEVICE_NAMES:
        known = " or ".join(f'"{name}"' for name in DEVICE_NAMES)
        raise wrong(
            "a placement's device type", known, device_type, LayoutError, remedy="use one of these"
        )


def _shape(nested: object, depth: int = 1) -> tuple[int, ...]:
    parts = nested if isinstance(nested, list | tuple | range) else ()
    if len(parts) > MOST_RANKS or depth > MOST_AXES:
        raise LayoutError(
            f"a placement has at most {MOST_RANKS} ranks and {MOST_AXES} axes, got {shown(nested)}; give fewer"
        )
    shapes = {_inner(part, depth) for part in parts}
    if len(shapes) != 1:
        expected = "a full grid of ranks such as [[0, 1], [2, 3]]"
        remedy = "give whole numbers in lists of equal length, none of them empty"
        raise wrong("a placement", expected, nested, LayoutError, remedy=remedy)
    return (len(parts), *shapes.pop())


def _inner(part: object, depth: int) -> tuple[int, ...]:
    return () if isinstance(part, int) and not isinstance(part, bool) else _shape(part, depth + 1)


def _flatten(nested: Sequence[Any], depth: int) -> list[int]:
    if depth == 1:
        return list(nested)
    return [rank for part in nested for rank in _flatten(part, depth - 1)]


def _nest(ranks: tuple[int, ...], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return list(ranks)
    step = len(ranks) // shape[0]
    return [_nest(ranks[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]
