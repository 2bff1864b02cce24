"""One rank of `weft measure`: measures side by side with the others; the first one keeps the figures.

Started as `weft run` starts a script: `measured_ranks.py RANKS PART PARTS [MODULE:FUNCTION STRATEGY]`; with more ranks
than there are processes, they are threads of this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from weft.cli.capture import find_job
from weft.hardware.measured_store import store_measurements
from weft.planning.progress import display_options, is_terminal
from weft.program.profiling.typical_steps import measured_job, measured_machine
from weft.runtime.world.distributed import current_world
from weft.runtime.world.world import local_world
from weft.strategy import Strategy


def main(arguments: Sequence[str]) -> None:
    """Measure as the arguments say."""
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
    main(sys.argv[1:])
