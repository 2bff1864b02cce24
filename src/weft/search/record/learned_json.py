"""The measures that a search made as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from math import isfinite
from typing import Any

from weft.search.evaluation.measures import Answer, Longer, Measures, Refused
from weft.search.record.learned import Learned, Look
from weft.search.space.coordinates import COORDINATES, WIDTH
from weft.search.space.point import Point
from weft.units import Bytes, Seconds


def to_json(learned: Learned) -> dict[str, Any]:
    """As dicts, lists, numbers and texts."""
    return {
        "answers": {key: _answer_json(each) for key, each in learned.answers.items()},
        "longer": {key: each.seconds for key, each in learned.longer.items()},
        "points": [[*astuple(point), _answer_json(each)] for point, each in learned.points.items()],
        "looks": [
            [*astuple(point), _answer_json(look.answer), look.seconds]
            for point, look in learned.looks.items()
        ],
    }


def _answer_json(answer: Answer | None) -> list[float] | str | None:
    if isinstance(answer, Refused):
        return answer.why
    if answer is None:
        return None
    return [answer.seconds, answer.memory, answer.exposed, answer.idle]


def from_json(content: Mapping[str, Any]) -> Learned:
    """The measures that `to_json` gave.

    Raises:
        ValueError, TypeError, KeyError: it did not.
    """
    return Learned(
        {str(key): _answer(each) for key, each in content["answers"].items()},
        {str(key): Longer(Seconds(_number(each))) for key, each in content["longer"].items()},
        {_point(row): _answer(answer) for *row, answer in content["points"]},
        {_point(row): _look(answer, seconds) for *row, answer, seconds in content["looks"]},
    )


def _look(answer: Any, seconds: Any) -> Look:
    return Look(None if answer is None else _answer(answer), _number(seconds))


def _answer(found: Any) -> Answer:
    if isinstance(found, str):
        return Refused(found)
    seconds, memory, exposed, idle = map(_number, found)
    return Measures(Seconds(seconds), Bytes(int(memory)), Seconds(exposed), Seconds(idle))


def _number(found: Any) -> float:
    """A finite number, not below 0; whole ones stay whole."""
    wrong = isinstance(found, bool) or not isinstance(found, int | float)
    if wrong or not isfinite(found) or found < 0:
        raise ValueError(f"expected a number that is not below 0, found {found!r}")
    return found  # type: ignore[no-any-return]


def _point(row: list[Any]) -> Point:
    if len(row) != WIDTH:
        raise ValueError(f"expected the {WIDTH} coordinates of a point, found {row!r}")
    for each, found in zip(COORDINATES, row, strict=True):
        if not each.may_be(found):
            raise ValueError(f"expected a point's {each.name}, found {found!r}")
    return Point(*row)
