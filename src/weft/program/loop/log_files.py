"""Files of logs: written at their end, and read back where they are to go on."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from weft.errors import UNREADABLE, UserError, shown
from weft.whole_files import cannot_write

# The name under which logs have steps.
STEP = "step"
_DAMAGE: tuple[type[Exception], ...] = (*UNREADABLE, csv.Error)


def log_path(path: object) -> Path:
    """The path of a log's file.

    Raises:
        UserError: it is none.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise UserError(f"weft.logs: a log takes the path of a file, found {shown(path)}")
    return Path(path)


def check_figures(figures: Mapping[str, float]) -> None:
    """Refuse a figure under the name that a log has for its steps."""
    if STEP in figures:
        raise UserError(
            f"a log has its steps under the name {STEP!r}, and so has a figure; give the figure another name"
        )


def append(file: TextIO, text: str, path: Path) -> None:
    """Write a line at the end of a log, so that others see it.

    Raises:
        UserError: it cannot be written, as where the disk is full.
    """
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        raise UserError(cannot_write(path, "the log", error)) from None


def columns_of(path: Path) -> list[str]:
    """The columns of a log that is there; none of another.

    Raises:
        UserError: it is no log, as where another program has written the table.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as opened:
            found = next(csv.reader(opened), [])
            if not found and opened.read().strip():
                raise ValueError("it begins with an empty line")
            if found and STEP not in found:
                raise ValueError(f"its header {found} has no column {STEP!r}")
            if len(set(found)) < len(found):
                raise ValueError(f"its header {found} has a column twice")
            return found
    except _DAMAGE as error:
        raise UserError(_no_log(path, error)) from None


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a log, by the names of its columns.

    Raises:
        UserError: naming the line that is wider than the header, or why it cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as opened:
            table, found = csv.DictReader(opened), list[dict[str, str]]()
            for row in table:
                if None in row:
                    raise ValueError(
                        f"line {table.line_num} has {sum(map(_width, row.values()))} cells, its header "
                        f"{len(table.fieldnames or ())}"
                    )
                found.append(row)
            return found
    except _DAMAGE as error:
        raise UserError(_no_log(path, error)) from None


def _width(cells: object) -> int:
    """The number of cells of an entry of a row: those beyond the header are one list."""
    return len(cells) if isinstance(cells, list) else 1


def _no_log(path: Path, error: Exception) -> str:
    return (
        f"cannot go on with the log {path}, which is no CSV of weft's: {getattr(error, 'strerror', None) or error}; "
        "mend the file, or give a path where nothing is"
    )


def opened_log(path: Path) -> TextIO:
    """A file that is written at its end, on a line of its own: a run that was killed may have left half of one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a", newline="", encoding="utf-8")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            opened.write("\n")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot write the log {path}: {why}; give a path that can be written"
        ) from None
    return opened
