"""`weft measure`: find out what calls, exchanges and acts take on this machine, and keep it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from weft.cli.capture import find_function, find_job
from weft.cli.run import RunOptions, run_script
from weft.hardware.measured_costs import PROCESSES, RANKS, THREADS, Measurements
from weft.hardware.measured_store import (
    cores,
    measured_folder,
    store_measurements,
    stored_measurements,
)
from weft.planning.progress import display_options, is_terminal
from weft.program.profiling.typical_steps import measured_job, measured_machine
from weft.runtime.world.distributed import current_world
from weft.runtime.world.world import local_world
from weft.strategy import Strategy
from weft.units import counted, seconds_text

_THREADS_OF = "OMP_NUM_THREADS"
# Ranks that measure side by side, and the processes that they run in: what they share makes them slower.
_SET_UPS = ((1, 1), (2, 2), (4, 4), (2, 1))


def measure_here(job: str = "", ranks: int = 0, strategy: Path | None = None) -> tuple[int, str]:
    """Measure this machine, and the distinct calls of a job where one is given.

    Args:
        job: "module:function" that returns a `weft.Job`; empty for general calls.
        ranks: that are at work; 0 for 1, 2 and 4, and 2 as threads of one process; of a job for one on each core.
        strategy: of the job, its file.

    Returns:
        the exit code of the first set-up that failed, else 0; and the text to print.

    Raises:
        UserError: there is no such job or strategy.
    """
    # At once, and as one line: ranks would each say so with a traceback.
    if strategy is not None:
        Strategy.load(strategy)
    if job:
        find_function(job)
    before = {str(each.machine): each for each in stored_measurements()}
    ranks = ranks or (cores() if job else 0)
    set_ups = ((ranks, ranks),) if ranks else _SET_UPS
    more = [job, str(strategy or "")] if job else []
    started = time.perf_counter()
    for number, (at_work, processes) in enumerate(set_ups):
        with _threads_of_its_own():
            arguments = [str(at_work), str(number), str(len(set_ups)), *more]
            code = run_script(Path(__file__), arguments, RunOptions(processes))
        if code:
            return code, ""
    return 0, "\n".join(_summary(before, time.perf_counter() - started))


@contextmanager
def _threads_of_its_own() -> Iterator[None]:
    """The launcher's choice of threads holds for one set-up."""
    given = os.environ.get(_THREADS_OF)
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(_THREADS_OF, None)


def _summary(before: Mapping[str, Measurements], took: float) -> Iterator[str]:
    """A line for each set-up that was measured, and where all of it is kept."""
    for each in stored_measurements():
        if before.get(str(each.machine)) == each:
            continue
        facts, found = each.machine, (each.calls, each.updates, each.exchanges)
        ranks, processes, threads = (int(facts[name]) for name in (RANKS, PROCESSES, THREADS))
        where = f"{counted(ranks, 'rank')} in {counted(processes, 'process', 'processes')}"
        kinds = zip(found, ("call", "optimizer", "exchange"), strict=True)
        yield (
            f"{where} of {counted(threads, 'thread')}: "
            f"{', '.join(counted(len(kept), kind) for kept, kind in kinds)}; "
            f"host: {seconds_text(each.act)} an act, {seconds_text(each.step)} a step"
        )
    yield f"measured in {took:.0f} s, kept in {measured_folder()}"


def measure_rank(arguments: Sequence[str]) -> None:
    """One rank of `weft measure`: it measures side by side with the others; the first one keeps the figures.

    Args:
        arguments: RANKS PART PARTS [MODULE:FUNCTION STRATEGY]; where there are more ranks than processes, they are
            threads of this one.
    """
    ranks, part, parts = map(int, arguments[:3])
    world = current_world()
    with local_world(ranks) if world.size < ranks else nullcontext(world) as own:
        kind = "threads" if world.size < ranks else "processes"
        with _bar(0 in own.ranks, f"{ranks} {kind}", part, parts) as begun:
            if len(arguments) == 3:
                found = measured_machine(own, begun)
            else:
                job, strategy = arguments[3:]
                planned = Strategy.load(strategy) if strategy else None
                found = measured_job(own, find_job(job), planned, begun)
        if 0 in own.ranks:
            store_measurements(found)


@contextmanager
def _bar(first: bool, name: str, part: int, parts: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on the terminal of the first rank; gives what tells it what begins."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, transient=True, disable=not (first and is_terminal()), **display_options()
    ) as bar:
        task = bar.add_task(f"weft measure: {name}", total=parts, completed=part)

        def begun(what: str) -> None:
            bar.update(task, description=f"weft measure: {name}: {what.partition('(')[0]}")

        yield begun


if __name__ == "__main__":
    measure_rank(sys.argv[1:])
