"""The rows of what brings batches to their steps: beside the queues of the first rank of a process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from weft.ir.plan import COMPUTE
from weft.program.data.loading import LoadedActs
from weft.program.data.loading_plan import COPIES, LOAD
from weft.program.trace.ran import Ran
from weft.program.trace.waits import arrows, wait
from weft.runtime.recording import Record
from weft.traces.rows import Arrow, RankTrace, Slice

# The names of the actors of each queue.
_NAMES = {LOAD: "load", COPIES: "copy", COMPUTE: "step"}


def with_loading(trace: RankTrace, loads: Mapping[int, LoadedActs]) -> RankTrace:
    """The trace of a rank with rows for the queues that load and copy.

    Their acts stand there with the number of the step for which they were, which ran later; in between what the queue
    waited for, such as the copy of a register that a slow step gives back late.

    Args:
        trace: of some steps.
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
