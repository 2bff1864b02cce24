"""The progress bar of a loop: steps, samples a second, figures, time left; and the means of what steps return."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, final

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from weft.planning.progress import alone, display_options, is_terminal
from weft.program.loop.logs import Figures, text_of
from weft.units import Seconds

# Figures that a bar has room for.
_SHOWN = 4


@final
class ProgressBar:
    """Counts steps and samples, and shows them on a terminal; `steps`: of all, None if not known."""

    def __init__(self, shown: bool, steps: int | None) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        # Names of figures are the user's: brackets in them are not markup.
        figures = TextColumn("{task.fields[text]}", markup=False)
        shows = shown and is_terminal()
        self._progress = Progress(*columns, *times, figures, disable=not shows, **display_options())
        self._stack = ExitStack()
        self._task = self._progress.add_task("training", total=steps, text="")
        self._since = time.monotonic()
        self._steps = self._samples = 0
        self._waited = 0.0

    def __enter__(self) -> ProgressBar:
        if not self._stack.enter_context(alone()):
            self._progress.disable = True
        self._stack.enter_context(self._progress)
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._stack.close()

    def advance(self, step: int, samples: int, waited: Seconds) -> None:
        """A step was made, of so many samples, for which it had waited."""
        self._steps += 1
        self._samples += samples
        self._waited += waited
        self._progress.update(self._task, completed=step)

    def figures(self) -> dict[str, float]:
        """Steps and samples a second since it was last asked for, and seconds that a step waited for its batch.

        The last figure is the peak memory of this process, in bytes.
        """
        now = time.monotonic()
        took = max(now - self._since, 1e-9)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {
            "steps_per_second": self._steps / took,
            "samples_per_second": self._samples / took,
            "data_seconds": self._waited / max(self._steps, 1),
            "peak_bytes": float(peak),
        }
        self._since, self._steps, self._samples, self._waited = now, 0, 0, 0.0
        return found

    def show(self, figures: Figures) -> None:
        """Show the last figures."""
        first = dict(list(figures.items())[:_SHOWN])
        self._progress.update(self._task, text=text_of(first))


@final
class RunningMeans:
    """The mean of each number that steps have returned since it was last asked for."""

    def __init__(self) -> None:
        # Sums, which may be on a device, and how many are in them.
        self._sums: dict[str, tuple[Any, int]] = {}

    def add(self, result: Any) -> None:
        """Add what a step has returned: a loss, alone or first, or numbers by name."""
        while isinstance(result, Sequence) and result and not isinstance(result, str):
            result = result[0]
        numbers = result if isinstance(result, Mapping) else {"loss": result}
        for name, number in numbers.items():
            if isinstance(number, Tensor) and number.numel() == 1 and not number.is_complex():
                total, count = self._sums.get(str(name), (0.0, 0))
                self._sums[str(name)] = total + number.detach().double(), count + 1

    def taken(self) -> dict[str, float]:
        """The means by name; from here on others begin."""
        sums, self._sums = self._sums, {}
        return {name: total.item() / count for name, (total, count) in sums.items()}
