"""Places for the figures of a loop: files, Python's logging, TensorBoard, Weights & Biases, Prometheus, functions."""

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

from weft.errors import UserError
from weft.program.loop.log_files import (
    STEP,
    append,
    check_figures,
    columns_of,
    opened_log,
    rows_of,
)
from weft.program.loop.prometheus import Prometheus as Prometheus
from weft.whole_files import write_whole

Figures: TypeAlias = Mapping[str, float]


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
        check_figures(figures)
        self._file = self._file or opened_log(self._path)
        plain = {name: x if math.isfinite(x) else None for name, x in figures.items()}
        append(self._file, json.dumps({STEP: step, **plain}) + "\n", self._path)

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
        check_figures(figures)
        if self._file is None:
            self._columns, self._file = columns_of(self._path), opened_log(self._path)
        row = {STEP: step, **figures}
        more = [name for name in row if name not in self._columns]
        if more:
            self._file.close()
            self._file = None
            self._widen(more)
            self._file = opened_log(self._path)
        line = io.StringIO(newline="")
        csv.DictWriter(line, self._columns).writerow(row)
        append(self._file, line.getvalue(), self._path)

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
        table.writerows(rows_of(self._path) if self._columns else ())
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
