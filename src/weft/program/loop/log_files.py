"""Files of logs: written at their end, and read back where they are to go on."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Mapping, Sequence
from os import SEEK_END
from pathlib import Path
from typing import Any, TextIO, TypeAlias, final

from weft.errors import UNREADABLE, UserError, shown
from weft.whole_files import cannot_write, write_in_folder

# The name under which logs have steps.
STEP = "step"
# Figures as they stand in a file, and their line.
Row: TypeAlias = tuple[Mapping[str, Any], str]
_log = logging.getLogger("weft")
_DAMAGE: tuple[type[Exception], ...] = (*UNREADABLE, csv.Error)


def log_path(path: object) -> Path:
    """The path of a log's file.

    Raises:
        UserError: it is none.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise UserError(f"weft.logs: a log takes the path of a file, found {shown(path)}")
    return Path(path)


def check_figures(figures: Mapping[str, Any]) -> None:
    """Refuse a figure under the name that a log has for its steps."""
    if STEP in figures:
        raise UserError(
            f"a log has its steps under the name {STEP!r}, and so has a figure; give the figure another name"
        )


@final
class LogFile:
    """The file of a log, in which each step has one line: what comes to the last step is written into its line."""

    def __init__(self, path: object) -> None:
        self.path = log_path(path)
        self._file: TextIO | None = None
        # The step of the last line, its figures, and where it begins.
        self._last: tuple[int, Mapping[str, Any], int] = (-1, {}, 0)

    def row(self, step: int, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The figures of a step, with those that its line has already.

        Raises:
            UserError: a figure has the name of the steps.
        """
        check_figures(figures)
        row = {STEP: step, **(self._last[1] if step == self._last[0] else {}), **figures}
        row[STEP] = step  # which a file has as a text
        return row

    def write(self, row: Mapping[str, Any], line: str) -> None:
        """Write the line of a row, so that others see it.

        Raises:
            UserError: it cannot be written, as where the disk is full.
        """
        file = self.opened()
        try:
            seekable = file.seekable()  # which a pipe is not
            at = file.seek(0, SEEK_END) if seekable else 0
            if row[STEP] == self._last[0] and seekable:
                at = file.truncate(self._last[2])
            file.write(line)
            file.flush()
        except OSError as error:
            raise UserError(cannot_write(self.path, "the log", error)) from None
        self._last = row[STEP], row, at

    def begin(self, step: int, head: Sequence[str], rows: Sequence[Row]) -> None:
        """Go on after a step: the lines of later ones, which come anew, go.

        Args:
            step: the last that was made.
            head: lines that are no rows.
            rows: of the file, and their lines.
        """
        kept = [(row, line) for row, line in rows if _step_of(row) <= step]
        gone = len(rows) - len(kept)
        if gone:
            _log.warning("%s: lines of steps after %d are dropped (%d)", self.path, step, gone)
        last = kept[-1][0] if kept else {}
        if gone or _step_of(last) == step:
            self.replace([*head, *(line for _, line in kept)], last)
        self.opened()

    def replace(self, lines: Sequence[str], last: Mapping[str, Any]) -> None:
        """Write the file anew, with these lines; `last` is the row of the last one."""
        self.close()
        text = "".join(lines)
        write_in_folder(self.path, text, "the log")
        at = len(text.encode()) - len(lines[-1].encode()) if lines else 0
        self._last = _step_of(last), last, at

    def opened(self) -> TextIO:
        """The file, open at its end."""
        if self._file is None:
            self._file = opened_log(self.path)
        return self._file

    def close(self) -> None:
        """Close it; the next line opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None


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


def lines_of(path: Path) -> list[Row]:
    """The objects of a file of them, a line each; none in a line that holds no object.

    Raises:
        UserError: it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    except _DAMAGE as error:
        raise UserError(_no_log(path, error, "JSON")) from None
    return [(_object_in(line), line if line.endswith("\n") else f"{line}\n") for line in lines]


def _object_in(line: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _step_of(row: Mapping[str, Any]) -> int:
    """The step of a row; -1 of one that says none, as where a run was killed."""
    try:
        return int(row[STEP])
    except (KeyError, TypeError, ValueError):
        return -1


def _width(cells: object) -> int:
    """The number of cells of an entry of a row: those beyond the header are one list."""
    return len(cells) if isinstance(cells, list) else 1


def _no_log(path: Path, error: Exception, kind: str = "CSV") -> str:
    return (
        f"cannot go on with the log {path}, which is no {kind} of weft's: {getattr(error, 'strerror', None) or error}; "
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
