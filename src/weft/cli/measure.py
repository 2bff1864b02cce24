"""`weft measure`: find out what calls, exchanges and acts take on this machine, and keep it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from weft.cli.capture import find_function
from weft.cli.run import RunOptions, run_script
from weft.hardware.measured_costs import PROCESSES, RANKS, THREADS, Measurements
from weft.hardware.measured_store import cores, measured_folder, stored_measurements
from weft.strategy.strategy import Strategy
from weft.units import counted, seconds_text

SCRIPT = Path(__file__).with_name("measured_ranks.py")
_THREADS_OF = "OMP_NUM_THREADS"
# Ranks that share the machine: what they share makes them slower.
_RANKS = (1, 2, 4)


@final
@dataclass(frozen=True)
class SetUp:
    """Ranks that measure side by side, each a process, or all as threads of one."""

    ranks: int
    processes: int


def measure_here(job: str = "", ranks: int = 0, strategy: Path | None = None) -> tuple[int, str]:
    """Measure this machine, and the distinct calls of a job where one is given.

    Args:
        job: "module:function" that returns a `weft.Job`; empty for general calls.
        ranks: that are at work; 0 for 1, 2 and 4, and 2 as threads of one process; of a job for one on each core.
        strategy: of the job, its file.

    Returns:
        the exit code of the first set-up that failed, else 0; and what is to be printed.

    Raises:
        UserError: there is no such job or strategy.
    """
    # At once, and as one line: ranks would each say so with a traceback.
    if strategy is not None:
        Strategy.load(strategy)
    if job:
        find_function(job)
    before = {str(each.machine): each for each in stored_measurements()}
    set_ups = _set_ups(ranks or (cores() if job else 0))
    more = [job, str(strategy or "")] if job else []
    started = time.perf_counter()
    for number, each in enumerate(set_ups):
        with _threads_of_its_own():
            arguments = [str(each.ranks), str(number), str(len(set_ups)), *more]
            code = run_script(SCRIPT, arguments, RunOptions(each.processes))
        if code:
            return code, ""
    return 0, "\n".join(_summary(before, time.perf_counter() - started))


def _set_ups(ranks: int) -> Sequence[SetUp]:
    if ranks:
        return (SetUp(ranks, ranks),)
    processes = [SetUp(each, each) for each in _RANKS]
    return (*processes, SetUp(2, 1))


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
