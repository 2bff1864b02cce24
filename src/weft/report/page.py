"""The page of a report: the template with its data inside."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.report.content import Data, Report
from weft.whole_files import write_whole

# The parts of the page's script, in order.
_SCRIPTS = (
    *("base.js", "summary.js", "model.js", "canvas.js", "lanes.js", "time.js", "memory.js"),
    *("bytes.js", "search.js", "run.js", "compare.js", "views.js"),
)


def page_of(reports: Sequence[Report]) -> str:
    """One HTML file, which needs nothing else; several reports stand side by side."""
    return page_of_data([each.data() for each in reports])


def page_of_data(reports: Sequence[Data]) -> str:
    """The page of the data of some reports."""
    folder = files("weft.report")
    template, style, *scripts = (
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("template.html", "report.css", *(f"scripts/{name}" for name in _SCRIPTS))
    )
    # "<" would end the script. What is not ASCII is escaped already.
    data = _json(list(reports)).replace("<", "\\u003c")
    title = html.escape(" | ".join(each["title"] for each in reports))
    parts = {"title": title, "style": style, "data": data, "script": "".join(scripts)}
    # At once: what is put in may hold such a name.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _json(reports: list[Data]) -> str:
    """The data as a browser reads it: what is not finite, which JSON has no word for, as null."""
    try:
        return json.dumps(reports, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(reports), separators=(",", ":"), allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(each) for name, each in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(each) for each in data]
    return None if isinstance(data, float) and not isfinite(data) else data


def write_report(path: str | Path, *reports: Report) -> Path:
    """Write reports as one file.

    Args:
        path: of the HTML file; folders that are missing are made.
        reports: one, or several to compare.

    Raises:
        UserError: it cannot be written.
    """
    return write_page(path, [each.data() for each in reports])


def write_page(path: object, reports: Sequence[Data]) -> Path:
    """Write the data of reports as one file, as `write_report` does.

    Raises:
        UserError: it cannot be written.
    """
    if not isinstance(path, str | Path) or not str(path).isprintable():
        raise UserError(f"a report takes the path of a file, found {path!r}")
    place = Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write the report {place}: {error.strerror}; give a path that can be written"
        ) from None
    write_whole(place, page_of_data(reports), "the report")
    return place
