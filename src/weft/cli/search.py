"""`weft search`: the fastest strategy of a graph file on a topology, with what is known while it is searched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from weft.errors import UserError
from weft.search.enumeration import Enumeration
from weft.search.outcome.result import SearchResult
from weft.search.search import search
from weft.strategy.strategy import Strategy


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


def search_graph(asked: SearchOptions, output: Path | None, as_json: bool = False) -> str:
    """Search a graph file; returns what is to be printed. Interrupted, the best so far counts.

    Args:
        asked: what, where and for how long.
        output: the file of the strategy, which is written where it is given.
        as_json: JSON in place of text.

    Raises:
        UserError: as `weft.search`; or the file cannot be written.
    """
    result = _found(asked)
    if output is not None:
        try:
            result.best.save(output)
        except OSError as error:
            raise UserError(
                f"cannot write the strategy {output}: {error.strerror}; give a path that can be written"
            ) from None
    return json.dumps(result.to_json()) if as_json else str(result)


def _found(asked: SearchOptions) -> SearchResult:
    fixed, start = (
        None if path is None else Strategy.load(path) for path in (asked.fixed, asked.start)
    )
    state: list[Enumeration] = []
    with _shown() as show:

        def told(found: Enumeration) -> None:
            state[:] = [found]
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
                raise
    return state[0].result()


@contextmanager
def _shown() -> Iterator[Callable[[Enumeration], None]]:
    """A table on a terminal's stderr that is drawn anew as the search goes on; nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    begin = monotonic()
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield lambda found: live.update(_table(found, monotonic() - begin), refresh=True)


def _table(found: Enumeration, seconds: float) -> Table:
    table = Table("best so far", "step", "bound", "gap", "planned", "a second")
    best = found.best
    if best is None:
        table.add_row("nothing fits yet", "", "", "", str(found.planned), "")
        return table
    name, _, measures = best
    table.add_row(
        name,
        f"{1e3 * measures.seconds:.3f} ms",
        f"{1e3 * found.bound:.3f} ms",
        f"{1 - found.bound / measures.seconds:.1%}",
        str(found.planned),
        f"{found.planned / max(seconds, 1e-9):.1f}",
    )
    return table
