"""The file of measurements: JSON that people can read, a call a line. Nothing of it is executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from weft.errors import UNREADABLE, UserError
from weft.hardware.costs import Slowdown
from weft.hardware.measured.figures import Measurements, Roofline, Sample, SizedSample
from weft.units import Bytes, Seconds

FORMAT = 3


def to_json(measured: Measurements) -> str:
    """The text of a file, readable: a call a line."""
    parts: dict[str, Mapping[str, object] | object] = {
        "weft measured costs": FORMAT,
        "machine": measured.machine,
        "act": measured.act,
        "exchange": measured.exchange,
        "step": measured.step,
        "slowdown": measured.slowdown,
        "drift": measured.drift,
        "memory": measured.memory,
        "roofline": measured.roofline,
        "exchanges": measured.exchanges,
        "updates": measured.updates,
        "calls": dict(sorted(measured.calls.items())),
    }
    lines = (f"{json.dumps(name)}: {_lines(part)}" for name, part in parts.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(part: object) -> str:
    if not isinstance(part, Mapping):
        return json.dumps(part)
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) + "\n}"


def from_json(text: str, where: str) -> Measurements:
    """The figures of a file.

    Raises:
        UserError: it is none of these, or of another version; names the file.
    """
    try:
        content = json.loads(text)
        if content["weft measured costs"] != FORMAT:
            raise UserError(
                f"{where}: measured costs of version {content['weft measured costs']!r}, expected {FORMAT}; "
                "run `weft measure` again"
            )
        return Measurements(
            {str(key): _fact(each) for key, each in content["machine"].items()},
            {str(name): Sample(*_figures(each, 3)) for name, each in content["calls"].items()},
            {str(name): _points(each) for name, each in content["updates"].items()},
            {str(name): _points(each) for name, each in content["exchanges"].items()},
            act=_seconds(content["act"]),
            exchange=_seconds(content["exchange"]),
            step=_seconds(content["step"]),
            slowdown=Slowdown(*(max(1.0, each) for each in _figures(content["slowdown"], 2))),
            drift=_figures([content["drift"]], 1)[0],
            memory=None if content["memory"] is None else _bytes(content["memory"]),
            roofline=None if content["roofline"] is None else _roofline(content["roofline"]),
        )
    except UNREADABLE as error:
        raise UserError(
            f"{where}: no file of measured costs ({type(error).__name__}: {error}); run `weft measure` again"
        ) from None


def _fact(found: Any) -> str | int:
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise ValueError(f"expected a text or a whole number, found {found!r}")
    return found


def _roofline(found: Any) -> Roofline:
    flops, traffic, start = _figures(found, 3)
    if not (flops and traffic):
        raise ValueError(f"expected rates above 0, found {found!r}")
    return Roofline(flops, traffic, Seconds(start))


def _seconds(found: Any) -> Seconds:
    return Seconds(_figures([found], 1)[0])


def _bytes(found: Any) -> Bytes:
    return Bytes(int(_figures([found], 1)[0]))


def _points(found: Any) -> tuple[SizedSample, ...]:
    if not found:
        raise ValueError("expected a size at least, found none")
    figures = (_figures(each, 3) for each in found)
    points = [
        SizedSample(Bytes(int(size)), Seconds(took), spread) for size, took, spread in figures
    ]
    if len({each.bytes for each in points}) < len(points):
        raise ValueError(f"expected each size once, found {found!r}")
    return tuple(sorted(points))


def _figures(found: Any, count: int) -> list[Any]:
    """So many finite numbers, none below 0, each of which a float can hold."""
    if len(found) != count:
        raise ValueError(f"expected {count} figures, found {found!r}")
    for each in found:
        if (
            isinstance(each, bool)
            or not isinstance(each, int | float)
            or not isfinite(each)
            or each < 0
        ):
            raise ValueError(f"expected a number that is not below 0, found {each!r}")
    return list(found)
