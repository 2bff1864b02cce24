"""The first page of `Program.explain`: exchanges, memory, limits; a screen for a model of any depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from weft.compiler.options import Options
from weft.compiler.pipeline import Compiled
from weft.compiler.schedule.scheduled import bubble, busy
from weft.compiler.stages.lay_out import Deduced
from weft.hardware.durations import Durations
from weft.hardware.planning_costs import costs_or_usual, costs_text
from weft.ir.plan import Communicate, Compute, RankPlan
from weft.program.explain.beside import exchange_lines
from weft.program.explain.details import deduction_notes
from weft.program.explain.memory import KINDS, ProgramMemory
from weft.program.explain.schedule import exceptions
from weft.program.explain.words import strategy_words, title
from weft.traces.events import joined_notes
from weft.units import Seconds, bytes_text, seconds_text

# As many notes are shown.
NOTES = 4


def explain(compiled: Compiled, options: Options, peaks: ProgramMemory, step: str) -> str:
    """The summary as plain text; `peaks` is the memory of the ranks of this process, `step` what a step takes."""
    lines = (
        title(compiled.graph),
        f"strategy: {strategy_words(compiled, options)}",
        step,
        *exchange_lines(compiled),
        memory_line(peaks),
        *limit_lines(compiled, options, peaks),
        *_layouts(compiled.deduced),
        *_notes(compiled),
        'tables of all layouts and boxing: explain(details=True); of some ops: explain(op="PATTERN")',
    )
    return "\n".join(lines) + "\n"


def _layouts(deduced: Sequence[Deduced]) -> Iterator[str]:
    """Say if layouts are proven cheapest: a line for all stages, or for the first that is not."""
    unproven = [each for each in deduced if not each.proven]
    if len(deduced) > 1 and unproven:
        yield f"layouts: proven cheapest in {len(deduced) - len(unproven)} of {len(deduced)} stages"
    shown = unproven[:1] or deduced[:1]
    yield next(deduction_notes(shown), "layouts: there is nothing to choose")
    broken = sum(each.broken for each in deduced)
    if broken:
        yield f"note: {broken} uses of parameters depart from the strategy's layouts: their ops admit nothing else"


def _notes(compiled: Compiled) -> Iterator[str]:
    """Wishes that were not possible, and differences from a step of the whole batch; repeated blocks once."""
    found = joined_notes((*compiled.notes, *exceptions(compiled.graph)))
    yield from (f"note: {text}" for text in found[:NOTES])
    if len(found) > NOTES:
        yield f"… and {len(found) - NOTES} more notes, below the tables"


_CELL = "text-align: left; vertical-align: top"


def short_html(
    compiled: Compiled, options: Options, peaks: ProgramMemory, more: Mapping[str, str]
) -> str:
    """The model, the way its step is shared out, what is sent, memory, and `more` rows, as a table of HTML."""
    name, sent = title(compiled.graph), next(exchange_lines(compiled))
    words = {"strategy": strategy_words(compiled, options), **more}
    words |= dict(line.split(": ", 1) for line in (sent, memory_line(peaks)))
    rows = "".join(
        f'<tr><th style="{_CELL}">{escape(key)}</th><td style="{_CELL}">{escape(text)}</td></tr>'
        for key, text in words.items()
    )
    return f"<table><caption>{escape(name)}</caption><tbody>{rows}</tbody></table>"


# From this part of the memory limit on, memory is what limits.
TIGHT = 0.9
# A kind of memory with less than this part of the peak is not named.
LEAST = 0.01


def memory_line(peaks: ProgramMemory) -> str:
    """The kinds of memory of the rank that holds most, of those of this process."""
    most = max(peaks, key=lambda each: each.predicted.peak)
    peak = most.predicted.peak
    sizes = {kind: getattr(most.predicted, kind) for kind in KINDS}
    shares = [
        f"{kind} {bytes_text(size)} ({100 * size / peak:.0f} %)"
        for kind, size in sorted(sizes.items(), key=lambda item: -item[1])
        if size >= LEAST * peak > 0
    ]
    measured = f", measured {bytes_text(most.measured.peak)}" if most.measured else ""
    return (
        f"memory of rank {most.rank}, the fullest here: {bytes_text(peak)} as planned{measured}; "
        f"{', '.join(shares)}"
    )


def limit_lines(compiled: Compiled, options: Options, peaks: ProgramMemory) -> Iterator[str]:
    """The longest part of a step, and the share of a pipeline's time that is idle."""
    schedule = compiled.schedule
    computing, communication = _seconds(compiled, options)
    first = "computing" if computing >= communication else "communication"
    known = costs_text(options.costs)
    yield (
        f"limited by {first}, as estimated ({known}): {seconds_text(computing)} of computing and "
        f"{seconds_text(communication)} of communication on a rank, the one beside the other where it can be"
    )
    limit, most = options.memory_limit, max(each.predicted.peak for each in peaks)
    if limit is not None and most >= TIGHT * limit:
        yield f"limited by memory, too: {100 * most / limit:.0f} % of memory_limit={limit} are planned"
    if schedule.simulation is not None:
        idle = [bubble(schedule, plan.rank) for plan in schedule.plans]
        least, largest = f"{100 * min(idle):.0f}", f"{100 * max(idle):.0f}"
        share = f"{least} %" if least == largest else f"{least} to {largest} %"
        yield (
            f"estimated {seconds_text(schedule.simulation.makespan)} a step, in which ranks have "
            f"nothing to compute for {share} of the time"
        )


def _seconds(compiled: Compiled, options: Options) -> tuple[Seconds, Seconds]:
    """Of a step: what the busiest rank computes, and what its busiest queue of communication takes."""
    schedule = compiled.schedule
    if schedule.simulation is not None:
        ranks = [plan.rank for plan in schedule.plans]
        return (
            max(Seconds(sum(busy(schedule, rank).values())) for rank in ranks),
            max(
                _busiest(_simulated(compiled, plan))
                for plan in schedule.plans
                if schedule.classes[plan.rank] == plan.rank
            ),
        )
    costs = costs_or_usual(options.costs, compiled.graph.placements[0].device_type)
    durations = Durations(costs, compiled.plan.communicators, compiled.families)
    plan, program = compiled.plan.ranks[0], compiled.programs[0]
    computing, queues = 0.0, dict[str, Seconds]()
    for actor, seconds in zip(plan.actors, durations.of(program, plan.actors), strict=True):
        if isinstance(actor, Compute):
            computing += seconds
        elif isinstance(actor, Communicate):
            queues[actor.queue] = Seconds(queues.get(actor.queue, 0.0) + seconds)
    return Seconds(computing), _busiest(queues)


def _simulated(compiled: Compiled, plan: RankPlan) -> dict[str, Seconds]:
    """Seconds that each queue of communication of a rank is busy, as simulated."""
    found: dict[str, Seconds] = {}
    for act in compiled.schedule.timeline(plan.rank):
        actor = plan.actors[act.actor]
        if isinstance(actor, Communicate):
            before = found.get(actor.queue, 0.0)
            found[actor.queue] = Seconds(before + act.end - act.start)
    return found


def _busiest(queues: dict[str, Seconds]) -> Seconds:
    return max(queues.values(), default=Seconds(0.0))
