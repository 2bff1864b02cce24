"""`weft report`: a page of runs, or of several reports side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.report.content import write_page
from weft.report.runs import reports_of


def join_reports(paths: Sequence[Path], output: Path) -> str:
    """Write one page of the reports of pages and folders of runs; returns what is to be printed.

    Raises:
        UserError: one cannot be read, or the page cannot be written.
    """
    found = reports_of(paths, but=output)
    place = write_page(output, found)
    titles = "".join(f"\n  {each['title']}" for each in found)
    return f"wrote {place}, which shows:{titles}"
