"""Places for the figures of a loop: files, Python's logging, TensorBoard, Weights & Biases, functions of the user's."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeAlias, final, runtime_checkable

from weft.errors import UNREADABLE, UserError
from weft.whole_files import cannot_write, write_whole

Figures: TypeAlias = Mapping[str, float]
# The name under which logs have steps.
STEP = "step"
_DAMAGE: tuple[type[Exception], ...] = (*UNREADABLE, csv.Error)


@runtime_checkable
class Log(Protocol):
    """Takes figures; the first process alone gives it some."""

    def write(self, step: int, figures: Figures) -> None:
        """Take the figures of a step."""

    def close(self) -> None:
        """The loop has ended."""


@final
class JsonLines:
    """A file with a JSON object for each step that is logged, null for what is not finite; one that is there goes on.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    def write(self, step: int, figures: Figures) -> None:
        """Write a line.

        Raises:
            UserError: the file cannot be written, or a figure is called "step".
        """
        _check_figures(figures)
        self._file = self._file or _opened(self._path)
        plain = {name: x if math.isfinite(x) else None for name, x in figures.items()}
        _append(self._file, json.dumps({STEP: step, **plain}) + "\n", self._path)

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None


@final
class Csv:
    """A file with a row for each step that is logged; one that is there goes on.

    A figure that comes later than the first row, as of an evaluation, gets a column of its own; the file is written
    anew then.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._columns: list[str] = []
        self._file: TextIO | None = None

    def write(self, step: int, figures: Figures) -> None:
        """Write a row.

        Raises:
            UserError: the file cannot be written, is another table than a log, or a figure is called "step".
        """
        _check_figures(figures)
        if self._file is None:
            self._columns, self._file = _columns(self._path), _opened(self._path)
        row = {STEP: step, **figures}
        more = [name for name in row if name not in self._columns]
        if more:
            self._file.close()
            self._file = None
            self._widen(more)
            self._file = _opened(self._path)
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns).writerow(row)
        _append(self._file, line.getvalue(), self._path)

    def close(self) -> None:
        """Close the file; the next row opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _widen(self, more: list[str]) -> None:
        """Write the file anew, with more columns."""
        columns = [*self._columns, *more]
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, columns)
        table.writeheader()
        table.writerows(_rows_of(self._path) if self._columns else ())
        write_whole(self._path, text.getvalue(), "the log")
        self._columns = columns


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
class TensorBoard:
    """TensorBoard's event files, by `torch.utils.tensorboard`.

    Args:
        folder: where they are written.

    Raises:
        UserError: the package `tensorboard` is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
        except ImportError as error:
            raise UserError(
                f"weft.logs.TensorBoard needs tensorboard; run pip install tensorboard ({error})"
            ) from None
        # The first process alone writes, and so has files.
        self._open: Callable[[], Any] = partial(SummaryWriter, str(folder))
        self._writer: Any = None

    def write(self, step: int, figures: Figures) -> None:
        """Add a scalar for each figure."""
        if self._writer is None:
            self._writer = self._open()
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


@final
class WeightsAndBiases:
    """A run of Weights & Biases.

    Args:
        options: as `wandb.init` takes them.

    Raises:
        UserError: the package `wandb` is not installed.
    """

    def __init__(self, **options: Any) -> None:
        try:
            import wandb  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
        except ImportError as error:
            raise UserError(
                f"weft.logs.WeightsAndBiases needs wandb; run pip install wandb ({error})"
            ) from None
        # The first process alone writes, and so has a run.
        self._begin: Callable[[], Any] = partial(wandb.init, **options)
        self._run: Any = None

    def write(self, step: int, figures: Figures) -> None:
        """Log the figures."""
        if self._run is None:
            self._run = self._begin()
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


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


def text_of(figures: Figures) -> str:
    """Figures in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def _check_figures(figures: Figures) -> None:
    if STEP in figures:
        raise UserError(
            f"a log has its steps under the name {STEP!r}, and so has a figure; give the figure another name"
        )


def _append(file: TextIO, text: str, path: Path) -> None:
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        raise UserError(cannot_write(path, "the log", error)) from None


def _columns(path: Path) -> list[str]:
    """The columns of a log that is there; none of another.

    Raises:
        UserError: it is no log, as where another program has written the table.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as opened:
            found = next(csv.reader(opened), [])
            if found and STEP not in found:
                raise ValueError(f"its header {found} has no column {STEP!r}")
            if len(set(found)) < len(found):
                raise ValueError(f"its header {found} has a column twice")
            return found
    except _DAMAGE as error:
        raise UserError(_no_log(path, error)) from None


def _rows_of(path: Path) -> list[dict[str, str]]:
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


def _opened(path: Path) -> TextIO:
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
