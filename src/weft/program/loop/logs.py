"""Places for the figures of a loop: a file of JSON lines, functions, and whatever else takes them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from os import SEEK_END
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeAlias, final, runtime_checkable

from weft.atomic_files import cannot_write, write_making_folder
from weft.errors import UNREADABLE, UserError, wrong

Figures: TypeAlias = Mapping[str, float]
# The name under which a line has its step.
STEP = "step"
_log = logging.getLogger("weft")


@runtime_checkable
class Log(Protocol):
    """Takes figures; the first process alone gives it some.

    One that has `begin(step)` too is told by the first process that the loop begins, after so many steps: what cannot
    be written is told before the first step then. One that has `fail()` is told so, in place of `close()`, that the
    loop has ended by an error.
    """

    def write(self, step: int, figures: Figures) -> None:
        """Take the figures of a step."""

    def close(self) -> None:
        """The loop has ended."""


@final
class JsonLines:
    """A file with a JSON object for each step that is logged, null for what is not finite; one that is there continues.

    Lines of steps after the one that a loop continues from, which are made again, go.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | Path) or not str(path):
            raise wrong("weft.logs: path", "the path of a file", path)
        self._path = Path(path)
        self._file: TextIO | None = None
        # The last line, and the byte at which it begins.
        self._last: Mapping[str, Any] = {}
        self._at = 0

    def begin(self, step: int) -> None:
        """Open the file.

        Raises:
            UserError: it cannot be read or written.
        """
        self.close()
        content = self._content()
        # A run that was killed may have left half a line.
        lines = [(_row(line), f"{line}\n") for line in content.splitlines()]
        kept = [(row, line) for row, line in lines if _step_of(row) <= step]
        gone = len(lines) - len(kept)
        if gone:
            _log.warning("%s: lines of steps after %d are dropped (%d)", self._path, step, gone)
        text = "".join(line for _, line in kept)
        if text != content:
            write_making_folder(self._path, text, "the log")
        self._last, last = kept[-1] if kept else ({}, "")
        self._at = len(text.encode()) - len(last.encode())
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", newline="", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            why = getattr(error, "strerror", None) or error
            raise UserError(
                f"cannot write the log {self._path}: {why}; give a path that can be written"
            ) from None

    def write(self, step: int, figures: Figures) -> None:
        """Write a line; figures of the step before join its line.

        Raises:
            UserError: the file cannot be written, or a figure is called "step".
        """
        if STEP in figures:
            raise UserError(
                f"a log has its steps under the name {STEP!r}, and so has a figure; give the figure another name"
            )
        if self._file is None:
            self.begin(step)
        assert self._file is not None
        before = self._last if _step_of(self._last) == step else {}
        plain = {name: x if math.isfinite(x) else None for name, x in figures.items()}
        row = {**before, STEP: step, **plain}
        try:
            seekable = self._file.seekable()  # which a pipe is not
            at = self._file.seek(0, SEEK_END) if seekable else 0
            if before and seekable:
                at = self._file.truncate(self._at)
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(cannot_write(self._path, "the log", error)) from None
        self._last, self._at = row, at

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _content(self) -> str:
        try:
            return self._path.read_bytes().decode() if self._path.is_file() else ""
        except UNREADABLE as error:
            raise UserError(
                f"cannot continue with the log {self._path}, which is not JSON that weft wrote: "
                f"{getattr(error, 'strerror', None) or error}; repair the file, or give a path where nothing is"
            ) from None


def _row(line: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _step_of(row: Mapping[str, Any]) -> int:
    """The step of a line; -1 of one that says none."""
    step = row.get(STEP)
    return step if isinstance(step, int) else -1


@final
class Calling:
    """A function of the user's, of a step and its figures, as a log."""

    def __init__(self, function: Callable[[int, Figures], object]) -> None:
        self._function = function

    def write(self, step: int, figures: Figures) -> None:
        """Call the function."""
        self._function(step, figures)

    def close(self) -> None:
        """Nothing is open."""


def log_of(given: object) -> Log:
    """A log that users give: one, or a function; raises UserError where it is neither."""
    if isinstance(given, Log):
        return given
    if callable(given):
        return Calling(given)
    expected = "logs, such as weft.logs.JsonLines(path), or functions of a step and its figures"
    raise wrong("weft.fit: log", expected, given)


def begin_logs(logs: Sequence[Log], step: int) -> None:
    """Tell logs that the loop begins after so many steps; raises UserError where one cannot be written."""
    for each in logs:
        begin = getattr(each, "begin", None)
        if begin is not None:
            begin(step)


def end_log(log: Log, kind: type[BaseException] | None, *_: object) -> None:
    """Close a log; tell one that can hear it that the loop has ended by an error."""
    end = log.close if kind is None else getattr(log, "fail", log.close)
    end()


def text_of(figures: Figures) -> str:
    """Figures in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
