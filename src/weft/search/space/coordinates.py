"""The coordinates of points: what each may be, and by which number it stands in a column.

`Point` declares them, one a field; all else that goes over every coordinate goes over these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, final

from weft.search.space.point import CHOICES, LEAST, Point


@final
@dataclass(frozen=True)
class Coordinate:
    """A coordinate of points.

    Attributes:
        name: of the field.
        choices: what it may be; empty for whole numbers.
        least: of whole numbers.
        default: MISSING where each point says it.
    """

    name: str
    choices: tuple[Any, ...]
    least: int
    default: Any

    def code(self, found: Any) -> int:
        """The number that stands for it in a column."""
        return self.choices.index(found) if self.choices else found

    def decoded(self, code: int) -> Any:
        """The coordinate that a number in a column stands for."""
        return self.choices[code] if self.choices else code

    def may_be(self, found: object) -> bool:
        """True for what it may be, by its type too: True is equal to 1."""
        if self.choices:
            return found in self.choices and type(found) is type(self.choices[0])
        return isinstance(found, int) and not isinstance(found, bool) and found >= self.least


# In the order of the fields, which is that of columns and of files.
COORDINATES = tuple(
    Coordinate(each.name, each.metadata.get(CHOICES, ()), each.metadata.get(LEAST, 1), each.default)
    for each in fields(Point)
)
WIDTH = len(COORDINATES)
# The numbers of the columns.
COLUMNS: Mapping[str, int] = {each.name: number for number, each in enumerate(COORDINATES)}
# The numbers of those that a point need not say; no point is without the others.
DEFAULTS: Mapping[str, int] = {
    each.name: each.code(each.default) for each in COORDINATES if each.default is not MISSING
}


def row_of(point: Point) -> tuple[int, ...]:
    """The numbers of a point, by column."""
    return tuple(each.code(getattr(point, each.name)) for each in COORDINATES)


def point_of(row: list[int]) -> Point:
    """The point that `row_of` gives the numbers of."""
    return Point(*(each.decoded(code) for each, code in zip(COORDINATES, row, strict=True)))
