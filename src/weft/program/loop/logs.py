"""Places for the figures of a loop: files, Python's logging, TensorBoard, Weights & Biases, Prometheus, functions."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from weft.errors import UserError
from weft.program.loop import log_files
from weft.program.loop.boards import TensorBoard as TensorBoard
from weft.program.loop.boards import WeightsAndBiases as WeightsAndBiases
from weft.program.loop.log_files import Row, columns_of, lines_of, rows_of
from weft.program.loop.prometheus import Prometheus as Prometheus

Figures: TypeAlias = Mapping[str, float]


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
    """A file with a JSON object for each step that is logged, null for what is not finite; one that is there goes on.

    Lines of steps after the one that a loop goes on from, which are made anew, go.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = log_files.LogFile(path)

    def begin(self, step: int) -> None:
        """Open the file.

        Raises:
            UserError: it cannot be read or written.
        """
        self._file.begin(step, [], lines_of(self._file.path))

    def write(self, step: int, figures: Figures) -> None:
        """Write a line; figures of the step before join its line.

        Raises:
            UserError: the file cannot be written, or a figure is called "step".
        """
        plain = {name: x if math.isfinite(x) else None for name, x in figures.items()}
        row = self._file.row(step, plain)
        self._file.write(row, json.dumps(row) + "\n")

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        self._file.close()


@final
class Csv:
    """A file with a row for each step that is logged; one that is there goes on.

    A figure that comes later than the first row, as of an evaluation, gets a column of its own; the file is written
    anew then. Rows of steps after the one that a loop goes on from, which are made anew, go.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = log_files.LogFile(path)
        self._columns: list[str] | None = None

    def begin(self, step: int) -> None:
        """Open the file.

        Raises:
            UserError: it cannot be read or written, or is another table than a log.
        """
        self._columns = columns_of(self._file.path)
        self._file.begin(step, *self._lines())

    def write(self, step: int, figures: Figures) -> None:
        """Write a row; figures of the step before join its row.

        Raises:
            UserError: the file cannot be written, is another table than a log, or a figure is called "step".
        """
        row = self._file.row(step, figures)
        if self._columns is None:
            self._columns = columns_of(self._file.path)
        more = [name for name in row if name not in self._columns]
        if more:
            self._widen(more)
        self._file.write(row, self._line(row))

    def close(self) -> None:
        """Close the file; the next row opens it again."""
        self._file.close()
        self._columns = None

    def _widen(self, more: list[str]) -> None:
        """Write the file anew, with more columns."""
        known = self._columns or []
        rows = rows_of(self._file.path) if known else []
        self._columns = [*known, *more]
        try:
            head, lines = self._lines(rows)
            self._file.replace([*head, *(line for _, line in lines)], rows[-1] if rows else {})
        except UserError:
            self._columns = known
            raise

    def _lines(
        self, rows: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[str], list[Row]]:
        """The header of the file, and rows of it with their lines; by default those that are there."""
        if not self._columns:
            return [], []
        every = rows_of(self._file.path) if rows is None else rows
        header = self._line(dict(zip(self._columns, self._columns, strict=True)))
        return [header], [(row, self._line(row)) for row in every]

    def _line(self, row: Mapping[str, Any]) -> str:
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns or ()).writerow(row)
        return line.getvalue()


@final
class Logging:
    """A line of Python's logging for each step that is logged.

    Args:
        logger: its name.
    """

    def __init__(self, logger: str = "weft") -> None:
        self._logger = logging.getLogger(logger)

    def write(self, step: int, figures: Figures) -> None:
        """Log a line."""
        self._logger.info("step %d: %s", step, text_of(figures))

    def close(self) -> None:
        """Nothing is open."""


@final
class Calling:
    """A function of the user's, as a log.

    Args:
        function: is called with the step and its figures.
    """

    def __init__(self, function: Callable[[int, Figures], object]) -> None:
        self._function = function

    def write(self, step: int, figures: Figures) -> None:
        """Call it."""
        self._function(step, figures)

    def close(self) -> None:
        """Nothing is open."""


def log_of(given: object) -> Log:
    """A log that users give: one, or a function.

    Raises:
        UserError: it is neither.
    """
    if isinstance(given, Log):
        return given
    if callable(given):
        return Calling(given)
    raise UserError(
        f"weft.fit: log takes logs, such as weft.logs.Csv(path), or functions of a step and its figures; "
        f"found {given!r}"
    )


def begin_logs(logs: Sequence[Log], step: int) -> None:
    """Tell logs that the loop begins after so many steps.

    Raises:
        UserError: one cannot be written.
    """
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
