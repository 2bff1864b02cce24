"""Trace: when every act of some steps ran, on all ranks and one clock; what queues waited for; where the time went."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter_ns
from types import MappingProxyType
from typing import TypeAlias, final

from weft.atomic_files import write_making_folder
from weft.compiler.pipeline import Compiled
from weft.errors import UserError
from weft.ir.plan import COMPUTE
from weft.program.data.loading import COPIES, LOAD, LoadedActs
from weft.program.explain.tables import table, text_of
from weft.program.trace.rank import Ran, arrows, rank_trace, wait, with_late_ranks
from weft.runtime.recording import Record
from weft.runtime.world.world import World
from weft.traces.events import lines_of, trace_events
from weft.traces.rows import Arrow, RankTrace, Slice, StepSpan, TimeParts, parts
from weft.units import Seconds

_COLUMNS = (
    "rank",
    "step",
    "compute",
    "communication",
    "hidden",
    "exposed",
    "late ranks",
    "idle",
    "data",
)


@final
@dataclass(frozen=True)
class Trace:
    """The traces of all ranks for some steps. Prints as a table of where the time went.

    Attributes:
        ranks: the rows of each rank, on one clock.
        batch: the leaves of the batch that the steps were planned for.
    """

    ranks: tuple[RankTrace, ...]
    batch: str = ""

    def __iter__(self) -> Iterator[RankTrace]:
        return iter(self.ranks)

    @cached_property
    def parts(self) -> tuple[TimeParts, ...]:
        """The shares of each rank's time, in seconds a step."""
        return tuple(map(parts, self.ranks))

    @property
    def exposed(self) -> Seconds:
        """Seconds a step in which compute queues wait while communicators act: the mean of the ranks."""
        return Seconds(sum(each.exposed for each in self.parts) / len(self.parts))

    def write(self, path: str | Path, predicted: Sequence[RankTrace] = ()) -> None:
        """Write it for ui.perfetto.dev or chrome://tracing; folders that are missing are made.

        Args:
            predicted: the timelines of ranks to stand beside it, in processes of their own.

        Raises:
            UserError: it cannot be written.
        """
        if predicted:
            behind = 1 + max(each.rank for each in self.ranks)
            events = trace_events(self.ranks, "measured")
            events += trace_events(predicted, "predicted", behind)
        else:
            events = trace_events(self.ranks)
        content = {
            "displayTimeUnit": "ms",
            "traceEvents": events,
            "otherData": {"batch": self.batch},
        }
        write_making_folder(path, json.dumps(content), "the timeline")

    def __str__(self) -> str:
        rows = (
            (
                str(each.rank),
                *map(_text, (each.step, each.compute, each.communication)),
                *map(_text, (each.hidden, each.exposed, each.late, each.idle, each.data)),
            )
            for each in self.parts
        )
        on = f" on {self.batch}" if self.batch else ""
        return text_of(table(f"where the time of a step{on} goes", _COLUMNS, rows))


def _text(seconds: Seconds) -> str:
    return f"{1000 * seconds:.3g} ms"


# For each of some exchanges between all ranks: when a rank entered and left it, on its own clock,
# in nanoseconds.
Visits: TypeAlias = Sequence[tuple[int, int]]


def ahead(own: Visits, first: Visits) -> int:
    """By how many nanoseconds a clock is ahead of that of the first rank.

    No rank leaves an exchange before all have entered it, which bounds the difference from both
    sides. A difference of 0 is taken where it is possible, since processes of one host share their
    clock; elsewhere the middle of the bounds.

    Args:
        own: the visits of a rank.
        first: those of the first rank, to the same exchanges.
    """
    pairs = list(zip(own, first, strict=True))
    least = max(entered - left for (entered, _), (_, left) in pairs)
    most = min(left - entered for (_, left), (entered, _) in pairs)
    return 0 if least <= 0 <= most else (least + most) // 2


# Exchanges by which clocks are compared: the fastest of them bound the difference.
_ROUNDS = 5


def gather_trace(
    world: World,
    compiled: Compiled,
    records: Mapping[int, Record],
    waits: Mapping[int, StepSpan],
    loads: Mapping[int, LoadedActs] = MappingProxyType({}),
) -> Trace:
    """Gather the traces of all ranks; every process must call it.

    Args:
        waits: of this process for the batches of steps, by the number of the step.
        loads: the acts of this process that brought these batches, likewise.

    Raises:
        UserError: when no step has run.
        RankFailure: when another process does not call it in time.
    """
    if not all(record.steps for record in records.values()):
        raise UserError(
            "there is nothing to trace: call step first (one that fails leaves nothing)"
        )
    plans, lines = compiled.plan, lines_of(compiled.graph)
    own = [
        rank_trace(plan, plans.communicators, records[plan.rank], lines, waits)
        for plan in plans.ranks
    ]
    own[0] = with_loading(own[0], loads)
    if not world.several:
        return Trace(with_late_ranks(own))
    visits = []
    for _ in range(_ROUNDS):  # when this process enters and leaves an exchange of all ranks
        entered = perf_counter_ns()
        world.gather(dict.fromkeys(world.ranks, "here"))
        visits.append((entered, perf_counter_ns()))
    texts = world.gather({each.rank: json.dumps([visits, each.text()]) for each in own})
    found: list[tuple[Visits, str]] = [json.loads(text) for text in texts]
    first, _ = found[0]
    traces = [RankTrace.of(text).moved(ahead(theirs, first)) for theirs, text in found]
    return Trace(with_late_ranks(traces))


# The names of the actors of each queue.
_NAMES = {LOAD: "load", COPIES: "copy", COMPUTE: "step"}


def with_loading(trace: RankTrace, loads: Mapping[int, LoadedActs]) -> RankTrace:
    """The trace of a rank with rows for the queues that load and copy.

    Their acts stand there with the number of the step for which they were, which ran later; in between what the queue
    waited for, such as the copy of a register that a slow step gives back late.

    Args:
        loads: the acts that brought the batches of steps, by the number of the step; also of other steps.
    """
    wanted = {each.number for each in trace.steps} & loads.keys()
    queues: dict[str, None] = {}
    slices: list[Slice] = []
    passed: list[Arrow] = []
    for ran, steps in _runs(loads, wanted):
        queues.update(dict.fromkeys(queue for queue in ran.queues if queue in (LOAD, COPIES)))
        slices += (each for each in _slices(ran, steps) if each.details["step"] in wanted)
        read = {span[1] for span in ran.record.spans if steps[span[0].step] in wanted}
        passed += (each for each in arrows(ran) if each.read in read)
    order = [queue for queue in (LOAD, COPIES) if queue in queues]
    return replace(
        trace,
        queues=(*trace.queues, *((queue, ()) for queue in order)),
        slices=(*trace.slices, *sorted(slices, key=lambda s: (order.index(s.queue), s.begin))),
        arrows=(*trace.arrows, *passed),
    )


def _runs(
    loads: Mapping[int, LoadedActs], wanted: Collection[int]
) -> Iterator[tuple[Ran, Mapping[int, int]]]:
    """Each loop that has loaded batches of some steps: what ran, and the program's number of each of its own steps."""
    # Plans of two loops may be equal, and count their steps each from 0.
    loops: dict[int, dict[int, LoadedActs]] = {}
    for step, acts in loads.items():
        loops.setdefault(id(acts.plan), {})[step] = acts
    for own in loops.values():
        if own.keys() & wanted:
            plan = next(iter(own.values())).plan
            spans = tuple(span for acts in own.values() for span in acts.spans)
            yield Ran(plan, Record((), spans)), {acts.number: step for step, acts in own.items()}


def _slices(ran: Ran, steps: Mapping[int, int]) -> Iterator[Slice]:
    def name(actor: int) -> str:
        return _NAMES[ran.plan.actors[actor].queue]

    for queue, row in ran.rows.items():
        free: int | None = None
        for span in row if queue in (LOAD, COPIES) else ():
            act, begin, end = span
            when = {"step": steps[act.step]}
            for each in wait(ran, span, begin if free is None else free, name):
                yield each._replace(details={**each.details, **when})
            yield Slice(queue, name(act.actor), "host", begin, end, {"actor": act.actor, **when})
            free = end
