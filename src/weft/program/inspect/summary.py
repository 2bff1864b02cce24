"""The first page of `Program.explain`: what a step is, sends and holds, and what limits it: a screen for any depth."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Literal

from weft.compiler.context import Options
from weft.compiler.microbatch.facts import cut_leaves
from weft.compiler.pipeline import Compiled
from weft.compiler.schedule.schedule import bubble, busy
from weft.compiler.stages.lay_out import Deduced
from weft.hardware.durations import Durations
from weft.hardware.planning_costs import costs_or_usual, costs_text
from weft.ir.logical import Box, Call, Input, LogicalGraph, Update, Value
from weft.ir.plan import Communicate, Compute
from weft.layout import Placement, Split
from weft.planning.exchanges import Exchanged, exchanges
from weft.program.inspect.details import deduction_notes
from weft.program.inspect.tables import KINDS, ProgramMemory, exceptions
from weft.strategy.parts import Zero, highest_level, level_of, zero_rules
from weft.traces.events import joined_notes
from weft.units import Seconds, bytes_text, counted, seconds_text

# As many notes are shown.
NOTES = 4


def explain(compiled: Compiled, options: Options, peaks: ProgramMemory, step: str) -> str:
    """The summary as plain text; `peaks` is the memory of the ranks of this process, `step` what a step takes."""
    # Wishes that were not possible, and differences from a step of the whole batch; repeated blocks once.
    notes = joined_notes((*compiled.notes, *exceptions(compiled.graph)))
    lines = (
        title(compiled.graph),
        f"strategy: {strategy_words(compiled, options)}",
        step,
        *exchange_lines(compiled),
        memory_line(peaks),
        *limit_lines(compiled, options, peaks),
        *_layouts(compiled.deduced),
        *(f"note: {text}" for text in notes[:NOTES]),
        *((f"… and {len(notes) - NOTES} more notes, below the tables",) if notes[NOTES:] else ()),
        'tables of all layouts and boxing: explain(details=True); of some ops: explain(op="PATTERN")',
    )
    return "\n".join(lines) + "\n"


# As many exchanges are named one by one.
DEAREST = 3


def exchange_lines(compiled: Compiled) -> Iterator[str]:
    """The exchanges of a rank in a step, a line for each group, and the most expensive of them."""
    graph = compiled.graph
    every = tuple(exchanges(compiled))
    ranks = len({rank for placement in graph.placements for rank in placement.ranks})
    if not every:
        yield "sent: nothing"
        return
    total = sum(each.bytes for each in every)
    number = _rounded(sum(len(each.kinds) * each.times * each.ranks for each in every), ranks)
    # As how many messages the exchanges of a rank of this process run, where small ones are joined.
    plan = compiled.plan.ranks[0]
    joined = [actor for actor in plan.actors if isinstance(actor, Communicate)]
    messages = ""
    if any(len(actor.collectives) > 1 for actor in joined):
        acts = counted(sum(actor.acts for actor in joined), "message")
        messages = f", which rank {plan.rank} joins into {acts}"
    yield (
        f"sent by a rank in a step, on average: {bytes_text(total // ranks)} in "
        f"{number} {'exchange' if number == '1' else 'exchanges'}{messages}"
    )
    for group, members in _sorted(every, "group"):
        size = sum(each.bytes for each in members) // ranks
        kinds = Counter[str]()
        for each in members:
            for kind in each.kinds:
                kinds[kind] += each.times * each.ranks
        run = ", ".join(f"{kind} ×{_rounded(n, ranks)}" for kind, n in kinds.items())
        yield f"  {group}: {bytes_text(size)} ({run})"
    yield "most expensive exchanges, and their share of the bytes sent:"
    for text, members in _sorted(every, "text")[:DEAREST]:
        size = sum(each.bytes for each in members)
        yield f"  {100 * size / total:.0f} %: {text}"


def _sorted(
    every: Iterable[Exchanged], name: Literal["group", "text"]
) -> list[tuple[str, list[Exchanged]]]:
    found = defaultdict[str, list[Exchanged]](list)
    for each in every:
        found[getattr(each, name)].append(each)
    return sorted(found.items(), key=lambda item: -sum(each.bytes for each in item[1]))


def _rounded(total: int, ranks: int) -> str:
    return f"{total // ranks}" if total % ranks == 0 else f"{total / ranks:.1f}"


def _layouts(deduced: Sequence[Deduced]) -> Iterator[str]:
    """Say if layouts are proven cheapest: a line for all stages, or for the first that is not."""
    unproven = [each for each in deduced if not each.assignment.proven]
    if len(deduced) > 1 and unproven:
        yield f"layouts: proven cheapest in {len(deduced) - len(unproven)} of {len(deduced)} stages"
    shown = unproven[:1] or deduced[:1]
    yield next(deduction_notes(shown), "layouts: there is nothing to choose")
    broken = sum(each.assignment.broken for each in deduced)
    if broken:
        yield f"note: {broken} uses of parameters differ from the strategy's layouts, because their ops allow no other"


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
        f"memory of rank {most.rank}, the highest here: {bytes_text(peak)} as planned{measured}; "
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
        f"{seconds_text(communication)} of communication on a rank, overlapped where possible"
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
    schedule = compiled.schedule
    if schedule.simulation is not None:
        computing: float = max(sum(busy(schedule, plan.rank).values()) for plan in schedule.plans)
        stand = [plan for plan in schedule.plans if schedule.classes[plan.rank] == plan.rank]
        acts = [
            (plan.rank, plan.actors[act.actor], act.end - act.start)
            for plan in stand
            for act in schedule.timeline(plan.rank)
        ]
    else:
        costs = costs_or_usual(options.costs, compiled.graph.placements[0].device_type)
        durations = Durations(costs, compiled.plan.communicators, compiled.families)
        plan, program = compiled.plan.ranks[0], compiled.programs[0]
        took = zip(plan.actors, durations.of(program, plan.actors), strict=True)
        acts = [(plan.rank, actor, seconds) for actor, seconds in took]
        computing = sum(seconds for _, actor, seconds in acts if isinstance(actor, Compute))
    queues = defaultdict[tuple[int, str], float](float)
    for rank, actor, seconds in acts:
        if isinstance(actor, Communicate):
            queues[rank, actor.queue] += seconds
    return Seconds(computing), Seconds(max(queues.values(), default=0.0))


# Ranks that a title names; of more it says how many there are.
_NAMED = 16


def title(graph: LogicalGraph) -> str:
    """The model, how it is trained, and where."""
    rules = dict.fromkeys(each.rule for each in graph.of_kind(Update) if each.rule != "copy")
    kind = f"training step by {', '.join(rules)}" if rules else "evaluation"
    ranks = sorted({rank for each in graph.placements for rank in each.ranks})
    where = str(graph.placements[0])
    if len(graph.placements) > 1 or len(ranks) > _NAMED:  # no grid, or a large one
        devices = ", ".join(dict.fromkeys(each.device_type for each in graph.placements))
        stages = len({call.phase.stage for call in graph.of_kind(Call)})
        where = f"{devices} {ranks if len(ranks) <= _NAMED else f'{len(ranks)} ranks'}"
        where += f" in {stages} stages" if stages > 1 else ""
    return f"{graph.name}, {kind} on {where}"


def strategy_words(compiled: Compiled, options: Options) -> str:
    """The way the step is shared out, read off its layouts; options where layouts do not tell."""
    graph, stages = compiled.graph, len(compiled.stages.placements)
    words = [*_batch(graph), *_parameters(compiled), *_zero(compiled, options)]
    if stages > 1:
        parts = f" × {graph.micro_batches} micro-batches" if graph.micro_batches > 1 else ""
        words.append(f"{stages} stages{parts}")
        words.append(f"schedule {compiled.schedule.name}")
        if options.in_flight is not None:
            words.append(f"in flight {', '.join(map(str, options.in_flight))}")
    elif graph.micro_batches > 1:
        words.append(f"{graph.micro_batches} micro-batches")
    if options.precision is not None:
        content = options.precision.content()
        words.append(" ".join(("precision", *(f"{name} {told}" for name, told in content.items()))))
    if any(each.rule != "copy" for each in graph.of_kind(Update)):
        for name in ("recompute", "offload"):
            if getattr(options, name):
                words.append(f"{name} {', '.join(getattr(options, name))}")
        if options.clip_norm is not None:
            words.append(f"gradients clipped to norm {options.clip_norm:g}")
    return ", ".join(words) or "all ranks compute the same"


def _batch(graph: LogicalGraph) -> Iterator[str]:
    """Along which axes and dimensions entries of the batch are split."""
    cut = cut_leaves(graph)
    found: dict[tuple[int, int, int], None] = {}
    for node in graph.of_kind(Input):
        if node.role == "batch":
            # A leaf in micro-batches has one dimension more.
            before = 1 if node.value.name in cut else 0
            splits = _splits(node.value)
            found.update(((axis, ranks, dim - before), None) for axis, ranks, dim in splits)
    for axis, ranks, dim in found:
        where = f"axis {axis} ({ranks} ranks)"
        yield (
            f"data parallel over {where}"
            if dim == 0
            else f"dimension {dim} of the batch over {where}"
        )


def _parameters(compiled: Compiled) -> Iterator[str]:
    """Along which axes how many parameters are used in shards, also such as are whole."""
    graph = compiled.graph
    nodes = [node for node in graph.of_kind(Input) if node.role == "parameter"]
    split = Counter[tuple[int, int]]()
    for node in nodes:
        boxed = (each.output for each in graph.users[node.value.name] if isinstance(each, Box))
        found = {part[:2] for value in (node.value, *boxed) for part in _splits(value)}
        split.update(each for each in found if compiled.stored.get(node.key) != each[0])
    for (axis, ranks), number in split.items():
        yield f"{number} of {len(nodes)} parameters split over axis {axis} ({ranks} ranks)"


def _zero(compiled: Compiled, options: Options) -> Iterator[str]:
    axes = ", ".join(map(str, dict.fromkeys(compiled.stored.values())))
    if not axes:
        if options.zero is not None:
            yield f"ZeRO {highest_level(options.zero)}, which shards nothing here"
    elif not options.zero:
        yield f"parameters kept in shards over axis {axes}"
    elif isinstance(options.zero, Zero):
        yield f"ZeRO {options.zero.level} over axis {axes}"
    else:  # parameters differ in it: of how many each level is
        rules = zero_rules(options.zero)
        keys = [node.key for node in compiled.graph.of_kind(Input) if node.role == "parameter"]
        found = Counter(level_of(rules, key) for key in keys if key in compiled.stored)
        levels = ", ".join(f"{level} for {found[level]}" for level in sorted(found))
        yield f"ZeRO {levels} of {len(keys)} parameters over axis {axes}"


def _splits(value: Value) -> Iterator[tuple[int, int, int]]:
    layout = value.layout
    assert layout is not None  # all values of a compiled graph have one
    placement: Placement = layout.placement
    for axis, sbp in enumerate(layout.sbp):
        if isinstance(sbp, Split) and placement.shape[axis] > 1:
            yield axis, placement.shape[axis], sbp.dim
