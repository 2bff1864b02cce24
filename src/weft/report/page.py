"""The page of a report: the template with its data inside."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from weft.errors import UserError
from weft.report.content import Data, Report, all_finite
from weft.whole_files import write_in_folder

# Errors call it so.
REPORT = "the report"
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
    """The data as a browser reads it."""
    try:
        return json.dumps(reports, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(all_finite(reports), separators=(",", ":"), allow_nan=False)


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
    write_in_folder(path, page_of_data(reports), REPORT)
    return Path(path)
