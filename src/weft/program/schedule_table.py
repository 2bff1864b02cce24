"""What `Program.explain` prints of the schedule: a row for each stage and rank, and the step as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from weft.compiler.schedule import Scheduled, bubble, busy, in_flight
from weft.ir.nodes import PhaseKind
from weft.ir.plan import RankPlan
from weft.program.tables import table

_KINDS: tuple[PhaseKind, ...] = ("forward", "backward", "weight")
_COLUMNS = ("stage", "rank", "in flight", *_KINDS, "idle")


def schedule_tables(scheduled: Scheduled) -> tuple[Table, ...]:
    """The table, when stages or micro-batches were scheduled.

    Times are estimates from shapes: their proportions decide, not their size.
    """
    if scheduled.rehearsal is None:
        return ()
    made = table(
        f"schedule: {scheduled.name}, {scheduled.plans[0].micro_batches} micro-batches",
        _COLUMNS,
        (row for plan in scheduled.plans for row in _rows(scheduled, plan)),
    )
    made.caption = f"estimated {_seconds(scheduled.rehearsal.makespan)} a step"
    made.caption_justify = "left"
    return (made,)


def _rows(scheduled: Scheduled, plan: RankPlan) -> Iterator[tuple[str, ...]]:
    work = busy(scheduled, plan.rank)
    for stage in sorted({phase.stage for phase in work}):
        times = {phase.kind: seconds for phase, seconds in work.items() if phase.stage == stage}
        yield (
            str(stage),
            str(plan.rank),
            str(in_flight(plan, stage)),
            *(_seconds(times[kind]) if kind in times else "" for kind in _KINDS),
            f"{bubble(scheduled, plan.rank):.0%}",
        )


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
