"""A trace in the format of Chrome's trace viewer, which Perfetto (ui.perfetto.dev) opens.

One process for each rank, one thread for each queue. Times are microseconds from the first step.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, final

from weft.ir.logical import Call, Location, LogicalGraph
from weft.ir.plan import COMPUTE, HOST, Actor, Communicate, Compute, LocalUpdate, RankPlan
from weft.traces.rows import Kind, RankTrace, Slice

Event: TypeAlias = "dict[str, Any]"

# The category of waits for batches, which are between steps.
DATA = "data"


def trace_content(
    measured: Sequence[RankTrace], predicted: Sequence[RankTrace] = (), batch: str = ""
) -> dict[str, Any]:
    """The content of a file for a viewer; where both are there, names of processes say which of them it is.

    Args:
        measured, predicted: the traces of ranks; each group begins at 0, in processes of its own.
        batch: the entries of the batch that the steps were planned for.
    """
    behind = 1 + max((each.rank for each in measured), default=-1)
    groups = ("measured", measured, 0), ("predicted", predicted, behind)
    several = bool(measured and predicted)
    events: list[Event] = []
    for group, traces, first in groups:
        own = trace_events(traces)
        events += (_in_group(event, group, first) for event in own) if several else own
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"batch": batch}}


def trace_events(traces: Sequence[RankTrace]) -> Iterator[Event]:
    """The events of ranks on one clock."""
    start = min((step.begin for trace in traces for step in trace.steps), default=0)
    arrow = count()
    return (event for trace in traces for event in _rank_events(trace, start, arrow))


def _in_group(event: Event, group: str, first: int) -> Event:
    event["pid"] += first
    # Arrows and steps of several groups are told apart by their numbers.
    if "id" in event:
        event["id"] = f"{group} {event['id']}"
    if event["name"] == "process_name":
        event["args"] = {"name": f"{group} {event['args']['name']}"}
    elif event["name"] == "process_sort_index":
        event["args"] = {"sort_index": event["pid"]}
    return event


def _rank_events(trace: RankTrace, start: int, arrow: count[int]) -> Iterator[Event]:
    threads = {queue: number for number, (queue, _) in enumerate(trace.queues)}
    yield from _names(trace, threads)
    for each in trace.slices:
        yield {
            **_at(trace, threads[each.queue], "X", each.name, each.begin - start),
            "cat": each.kind,
            "dur": (each.end - each.begin) / 1000,
            "args": each.details,
        }
    for number, begin, end in trace.data:
        yield {
            **_at(trace, 0, "X", f"waits for the batch of step {number}", begin - start),
            "cat": DATA,
            "dur": (end - begin) / 1000,
            "args": {"step": number},
        }
    for register, source, target, made, read in trace.arrows:
        # The last nanosecond of the producer's slice, and the first of the reader's.
        ends = (("s", threads[source], made - 1), ("f", threads[target], read))
        place = next(arrow)
        for phase, thread, time in ends:
            event = _at(trace, thread, phase, register, time - start)
            yield {**event, "cat": "register", "id": place, "bp": "e"}
    for time, size in trace.levels:
        yield {**_at(trace, 0, "C", "memory", time - start), "args": {"bytes": size}}
    for number, begin, end in trace.steps:
        for phase, time in (("b", begin), ("e", end)):
            event = _at(trace, 0, phase, f"step {number}", time - start)
            yield {**event, "cat": "step", "id": f"{trace.rank}.{number}"}


def _at(trace: RankTrace, thread: int, phase: str, name: str, time: int) -> Event:
    return {"pid": trace.rank, "tid": thread, "ph": phase, "name": name, "ts": time / 1000}


def _names(trace: RankTrace, threads: dict[str, int]) -> Iterator[Event]:
    """Names of the rows, and their order."""
    yield _meta(trace, 0, "process_name", {"name": f"rank {trace.rank}"})
    yield _meta(trace, 0, "process_sort_index", {"sort_index": trace.rank})
    for queue, ranks in trace.queues:
        text = f"{queue} of ranks {', '.join(map(str, ranks))}" if ranks else queue
        yield _meta(trace, threads[queue], "thread_name", {"name": text})
        yield _meta(trace, threads[queue], "thread_sort_index", {"sort_index": threads[queue]})


def _meta(trace: RankTrace, thread: int, name: str, args: dict[str, str | int]) -> Event:
    return {"pid": trace.rank, "tid": thread, "ph": "M", "name": name, "args": args}


def stars(name: str) -> str:
    """`blocks.3.fc` as `blocks.*.fc`, so that repeated blocks fall together; files relative to here."""
    return re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", near(name))


def near(text: str) -> str:
    """A text with files relative to here."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")


def joined_notes(notes: Iterable[str]) -> list[str]:
    """Notes with * in place of the numbers of layers, each once, with how often it stood there."""
    found = Counter(map(stars, notes))
    return [note if times == 1 else f"{note} (×{times})" for note, times in found.items()]


Lines: TypeAlias = Mapping[str, Location]
Details: TypeAlias = "dict[str, str | int]"


def lines_of(graph: LogicalGraph) -> Lines:
    """For each value that a call of the graph makes, the user's line."""
    return {
        value.name: call.location
        for call in graph.of_kind(Call)
        for value in call.outputs
        if value is not None and call.location is not None
    }


def actor_kind(actor: Actor) -> Kind:
    """The kind of an actor's slices."""
    if isinstance(actor, Compute):
        return "compute"
    return "communication" if isinstance(actor, Communicate) else "host"


def actor_name(actor: Actor, lines: Lines) -> str:
    """A short name: "forward blocks.0 … head", "all_reduce mm_1 +3", "update 4 parameters", "feed"."""
    if isinstance(actor, Communicate):
        first = actor.collectives[0]
        return f"{first.kind} {(*first.reads, *(v.name for v in first.makes))[0]}{_more(actor)}"
    if isinstance(actor, Compute):
        updates = [node for node in actor.nodes if isinstance(node, LocalUpdate)]
        if len(updates) == len(actor.nodes):
            return f"update {updates[0].key if len(updates) == 1 else f'{len(updates)} variables'}"
        found = _locations(actor, lines)
        backward = sum(location.backward for location in found) * 2 > len(found)
        kind = "backward" if backward and actor.phase.kind == "forward" else actor.phase.kind
        modules = [_short(location.module) for location in found if location.module]
        ends = dict.fromkeys((modules[0], modules[-1])) if modules else ()
        return " ".join((kind, " … ".join(ends))).rstrip()
    return type(actor).__name__.lower()


def actor_details(actor: Actor, lines: Lines) -> Details:
    """The details that are known of every act of an actor."""
    details: Details = {"actor": actor.id}
    if isinstance(actor, (Compute, Communicate)):
        details["phase"] = f"stage {actor.phase.stage} {actor.phase.kind}"
    if isinstance(actor, Communicate):
        # Over all ranks of the communicator.
        details["bytes"] = sum(each.bytes for each in actor.collectives)
    if isinstance(actor, Compute):
        details["calls"] = len(actor.nodes)
        found = _locations(actor, lines)
        if found:
            details["from"], details["to"] = str(found[0]), str(found[-1])
    return details


def _locations(actor: Compute, lines: Lines) -> list[Location]:
    made = (value.name for node in actor.nodes for value in node.makes)
    return [lines[name] for name in made if name in lines]


def _short(module: str) -> str:
    """A module's path up to the number of its block."""
    parts = module.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:1])


def _more(actor: Communicate) -> str:
    return f" +{len(actor.collectives) - 1}" if len(actor.collectives) > 1 else ""


def rows_of(plan: RankPlan) -> tuple[str, ...]:
    """The queues of a rank as rows: compute, host, communicators by number."""
    others = sorted(set(plan.on_queue) - {COMPUTE, HOST}, key=lambda name: (len(name), name))
    return (COMPUTE, HOST, *others)


@final
class ActSlices:
    """Makes slices of the acts of a rank, measured or simulated; `names` of actors by id."""

    def __init__(self, plan: RankPlan, lines: Lines) -> None:
        self._actors = plan.actors
        self._details = [actor_details(actor, lines) for actor in plan.actors]
        # The place of an actor in its queue: of a communication the same on all ranks.
        self._place = {a.id: n for own in plan.on_queue.values() for n, a in enumerate(own)}
        self.names = [actor_name(actor, lines) for actor in plan.actors]

    def of(
        self,
        act: tuple[int, int, int],
        span: tuple[int, int],
        number: int,
        peers: tuple[int, ...],
    ) -> Slice:
        """The slice of an act (actor, step, micro-batch); `number` of the step is shown; `peers` may be waited for."""
        id, step, micro = act
        actor, (begin, end) = self._actors[id], span
        known: Details = {"step": number}
        if actor.acts > 1:
            known["micro-batch"] = micro
        kind = actor_kind(actor)
        queue, details = actor.queue, {**known, **self._details[id]}
        meeting = f"{queue} {self._place[id]} {step} {micro}" if kind == "communication" else ""
        return Slice(
            queue, self.names[id], kind, begin, end, details, meeting, peers if meeting else ()
        )
