"""`weft search`: the fastest strategy of a graph file on a topology, with what is known while it is searched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import final

import typer
from rich.live import Live
from rich.table import Table

from weft.atomic_files import check_writable, make_folder_of, write_atomically
from weft.cli.plans import PlanOptions
from weft.errors import UserError
from weft.planning.machine import machine_of
from weft.planning.progress import display_options, is_terminal
from weft.planning.stored_step import StoredStep
from weft.report import Report, write_report
from weft.report.content import REPORT
from weft.search.record import SearchRecord
from weft.search.result import SearchResult
from weft.search.search import search, with_memory_limit
from weft.search.state import SearchState
from weft.strategy.strategy import Strategy

_STRATEGY, _RECORD = "the strategy", "the record of the search"
# The record is written again after so many seconds, and so many times as long as that took.
_SECONDS, _TIMES = 2.0, 50


@final
@dataclass(frozen=True)
class SearchOptions:
    """The arguments of the command, as `weft.search` takes them."""

    graph: Path
    topology: str
    seconds: float
    fixed: Path | None
    start: Path | None
    memory_limit: int | None
    seed: int
    moves: int | None


@final
class SearchFiles:
    """The file of the best strategy, and the record of the search beside it: `best.yaml`, `best.search.json`.

    Both are written whenever something faster was found, and at the end; the record every few seconds besides.

    Args:
        output: the file of the strategy; None for no files.

    Raises:
        UserError: one cannot be written.
    """

    def __init__(self, output: Path | None) -> None:
        self._output = output
        self._written = ""
        self._took = self._ended = 0.0
        if output is not None:
            check_writable(output, _STRATEGY)
            if self._has_record:
                check_writable(self.record, _RECORD)

    @property
    def _has_record(self) -> bool:
        """False if the strategy goes to what is not a file, such as a pipe."""
        return self._output is not None and (self._output.is_file() or not self._output.exists())

    @property
    def record(self) -> Path:
        """The file of the record."""
        if self._output is None:
            raise UserError(
                "--resume continues with the search whose files -o names; give -o best.yaml, as the first time"
            )
        return self._output.with_suffix(".search.json")

    def earlier(self) -> SearchRecord | None:
        """The record of the search before; None if there is none.

        Raises:
            UserError: it cannot be read.
        """
        return SearchRecord.load(self.record) if self.record.exists() else None

    def write(self, best: Strategy, record: Callable[[], SearchRecord]) -> None:
        """Write both where this strategy was not written last; else the record alone, once it is worth its time."""
        if self._output is None:
            return
        text = best.to_text()
        if text != self._written:
            self._write(text, record)
        elif monotonic() - self._ended > max(_SECONDS, _TIMES * self._took):
            self._write_record(record)

    def write_all(self, best: Strategy, record: Callable[[], SearchRecord]) -> None:
        """Write both, whatever was written last."""
        if self._output is not None:
            self._write(best.to_text(), record)

    def _write(self, text: str, record: Callable[[], SearchRecord]) -> None:
        assert self._output is not None
        # First, so that a strategy that is there is in the record, whenever the search is killed.
        self._write_record(record)
        write_atomically(self._output, text, _STRATEGY)
        self._written = text

    def _write_record(self, record: Callable[[], SearchRecord]) -> None:
        if self._has_record:
            begin = monotonic()
            record().save(self.record)
            self._ended = monotonic()
            self._took = self._ended - begin


def search_graph(
    asked: SearchOptions,
    output: Path | None,
    resume: bool = False,
    as_json: bool = False,
    report: Path | None = None,
) -> str:
    """Search a graph file; returns the text to print. Interrupted, the best so far counts.

    Args:
        output: the file of the strategy, written if given.
        resume: true to continue the search whose record is beside `output`.
        report: a page that shows what was found and tried, written if given.

    Raises:
        UserError: as `weft.search`; a file cannot be read or written, or is of a search of something else.
    """
    files = SearchFiles(output)
    if report is not None:
        make_folder_of(report, REPORT)
        check_writable(report, REPORT)
    result = _found(asked, files, _start(asked, files, resume))
    files.write_all(result.best, lambda: result.record)
    if report is not None:
        # The search keeps measures, not plans: that of the best is made once more.
        plan = PlanOptions(asked.graph, result.best, asked.topology, "").found()
        shown = Report(
            *(plan.title, plan.compiled, result.simulation),
            search=result,
            strategy=result.best,
        )
        write_report(report, shown)
    return json.dumps(result.to_json()) if as_json else str(result)


def _start(
    asked: SearchOptions, files: SearchFiles, resume: bool
) -> Strategy | SearchRecord | None:
    """The strategy or the search to begin with."""
    if not resume:
        return None if asked.start is None else Strategy.load(asked.start)
    if asked.start is not None:
        raise UserError(
            "--resume continues an earlier search, --start begins from a strategy; give one of them"
        )
    record = files.earlier()
    if record is None:
        typer.echo(
            f"nothing to resume: there is no {files.record}; the search begins again", err=True
        )
        return None
    step = StoredStep.load(asked.graph)
    machine = with_memory_limit(machine_of(asked.topology), asked.memory_limit)
    if not record.is_of(step, machine):
        raise UserError(
            f"--resume: {files.record} is the record of a search with another graph or topology than {asked.graph} on "
            f"{asked.topology}; give another -o, or --start with its strategy"
        )
    return record


def _found(
    asked: SearchOptions, files: SearchFiles, start: Strategy | SearchRecord | None
) -> SearchResult:
    fixed = None if asked.fixed is None else Strategy.load(asked.fixed)
    state: list[SearchState] = []
    with _shown() as show:

        def told(found: SearchState) -> None:
            state[:] = [found]
            if found.best is not None:
                files.write(_strategy_of(found), found.record)
            show(found)

        try:
            return search(
                asked.graph,
                asked.topology,
                seconds=asked.seconds,
                fixed=fixed,
                start=start,
                memory_limit=asked.memory_limit,
                seed=asked.seed,
                moves=asked.moves,
                told=told,
            )
        except KeyboardInterrupt:
            if not state or state[0].best is None:
                typer.echo("interrupted before a strategy that fits was planned", err=True)
                raise
    # Print first: a second Ctrl-C, in the time that the result takes, must not lose it.
    found = state[0]
    files.write_all(_strategy_of(found), found.record)
    found.end()
    return found.result()


def _strategy_of(found: SearchState) -> Strategy:
    """The best so far, once something fits."""
    assert found.best is not None
    return found.best[1]


@contextmanager
def _shown() -> Iterator[Callable[[SearchState], None]]:
    """A table on a terminal's stderr that is drawn again as the search continues; nothing elsewhere."""
    if not is_terminal():
        yield lambda _: None
        return
    begin = monotonic()
    with Live(transient=True, auto_refresh=False, **display_options()) as live:
        yield lambda found: live.update(_table(found, monotonic() - begin), refresh=True)


def _table(found: SearchState, seconds: float) -> Table:
    table = Table("best so far", "step", "bound", "gap", "planned", "a second")
    best = found.best
    if best is None:
        table.add_row("nothing fits yet", "", "", "", str(found.planned), "")
        return table
    name, _, measures = best
    table.add_row(
        name,
        f"{1e3 * measures.seconds:.3f} ms",
        f"{1e3 * found.bound:.3f} ms" if found.bound else "",
        f"{1 - found.bound / measures.seconds:.1%}" if found.bound else "",
        str(found.planned),
        f"{found.planned / max(seconds, 1e-9):.1f}",
    )
    return table
