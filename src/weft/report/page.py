"""The page of a report: the template with its data inside."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from weft.errors import UserError
from weft.report.content import Report
from weft.whole_files import write_whole


def page_of(reports: Sequence[Report]) -> str:
    """One HTML file, which needs nothing else; several reports stand side by side."""
    folder = files("weft.report")
    template = folder.joinpath("template.html").read_text(encoding="utf-8")
    style = folder.joinpath("report.css").read_text(encoding="utf-8")
    script = folder.joinpath("report.js").read_text(encoding="utf-8")
    title = " | ".join(each.title for each in reports)
    # "<" would end the script.
    data = json.dumps([each.data() for each in reports], separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    parts = {"title": html.escape(title), "style": style, "data": data, "script": script}
    # At once: what is put in may hold such a name.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def write_report(path: str | Path, *reports: Report) -> Path:
    """Write reports as one file.

    Args:
        path: of the HTML file; folders that are missing are made.
        reports: one, or several to compare.

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
    write_whole(place, page_of(reports), "the report")
    return place
