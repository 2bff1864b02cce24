"""Predicted beside measured seconds in `Program.explain`: of the step, and of every boxing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, final

from rich.table import Table

from weft.boxing import EXCHANGES, steps
from weft.compiler.halos import graph_halos
from weft.compiler.pipeline import Compiled
from weft.ir.logical import Box, LogicalGraph
from weft.ir.plan import Communicate, Exchange, RankPlan, Transfer
from weft.planning.exchanges import Exchanged, exchanges
from weft.program.explain.tables import table
from weft.runtime.recording import Record
from weft.simulator.results.simulation import Simulation
from weft.units import ITEM_SIZE, Seconds, bytes_text, counted, seconds_text

HALO = ".halo"


@final
@dataclass(frozen=True)
class BoxTimes:
    """Seconds of a step that a rank communicates for each boxing, by the name of the value that it makes.

    Several that travel in one message share its seconds by their bytes.

    Attributes:
        predicted: as simulated.
        measured: in the last step, with the wait for other ranks; empty before the first.
    """

    predicted: Mapping[str, Seconds] = field(default_factory=dict)
    measured: Mapping[str, Seconds] = field(default_factory=dict)


def step_line(predicted: Simulation, record: Record, waited: Seconds | None = None) -> str:
    """The seconds of a step, as predicted and as the last one took, and for which that had waited for its batch."""
    about = " (about: figures are missing)" if predicted.estimates else ""
    text = f"step: {seconds_text(predicted.step_seconds)} predicted{about}"
    if not record.steps:
        return f"{text}, none measured yet"
    last = record.steps[-1]
    took = f"{seconds_text(Seconds((last.end - last.begin) / 1e9))} measured, the last one"
    data = "" if waited is None else f", which waited {seconds_text(waited)} for its batch"
    return f"{text}, {took}{data}"


def box_times(
    compiled: Compiled, plan: RankPlan, predicted: Simulation, record: Record
) -> BoxTimes:
    """The seconds of boxing on one rank.

    Args:
        record: what the rank recorded of the last one.
    """
    shares = dict(_shares(compiled, plan))
    stands = compiled.schedule.classes.get(plan.rank, predicted.ranks[0].rank)
    own = next(trace for trace in predicted.traces if trace.rank == stands)
    simulated = ((int(s.details["actor"]), (s.end - s.begin) / 1e9) for s in own.slices)
    last = record.steps[-1].step if record.steps else None
    ran = ((act.actor, (end - begin) / 1e9) for act, begin, end in record.spans if act.step == last)
    return BoxTimes(_shared(simulated, shares), _shared(ran, shares))


def _shares(
    compiled: Compiled, plan: RankPlan
) -> Iterator[tuple[int, tuple[tuple[str, float], ...]]]:
    """For each communicating actor, the boxings that it runs, and their shares of its bytes."""
    boxes = {node.input.name: node.output.name for node in compiled.graph.of_kind(Box)}
    boxes |= {name: name for name in boxes.values()}
    for actor in plan.actors:
        if isinstance(actor, Communicate):
            total = sum(each.bytes for each in actor.collectives)
            even = 1 / len(actor.collectives)
            yield (
                actor.id,
                tuple(
                    (_box_of(each, boxes), each.bytes / total if total else even)
                    for each in actor.collectives
                ),
            )


def _box_of(exchange: Exchange, boxes: Mapping[str, str]) -> str:
    """The value that a boxing makes by way of an exchange; of border rows, the value that they belong to."""
    made = exchange.output if exchange.output is not None else exchange.input
    assert made is not None  # one side at least is here
    name = made.name
    if isinstance(exchange, Transfer) and HALO in name:
        return name.partition(HALO)[0] + HALO
    while name not in boxes and "." in name:
        name = name.rpartition(".")[0]
    return boxes.get(name, name)


def _shared(
    acts: Iterable[tuple[int, float]], shares: Mapping[int, tuple[tuple[str, float], ...]]
) -> dict[str, Seconds]:
    found: Counter[str] = Counter()
    for actor, seconds in acts:
        for name, share in shares.get(actor, ()):
            found[name] += share * seconds  # type: ignore[assignment]  # seconds, not counts
    return {name: Seconds(seconds) for name, seconds in found.items()}


# As many exchanges are named one by one.
DEAREST = 3


def exchange_lines(compiled: Compiled) -> Iterator[str]:
    """The exchanges of a rank in a step, a line for each group, and the dearest of them."""
    graph = compiled.graph
    every = tuple(exchanges(compiled))
    ranks = len({rank for placement in graph.placements for rank in placement.ranks})
    if not every:
        yield "sent: nothing"
        return
    total = sum(each.bytes for each in every)
    number = _number(every, ranks)
    yield (
        f"sent by a rank in a step, on average: {bytes_text(total // ranks)} in "
        f"{number} {'exchange' if number == '1' else 'exchanges'}{_messages(compiled)}"
    )
    for group, members in _sorted(every, "group"):
        size = sum(each.bytes for each in members) // ranks
        kinds = Counter[str]()
        for each in members:
            for kind in each.kinds:
                kinds[kind] += each.times * each.ranks
        run = ", ".join(f"{kind} ×{_rounded(n, ranks)}" for kind, n in kinds.items())
        yield f"  {group}: {bytes_text(size)} ({run})"
    yield "dearest exchanges, and how much of what is sent:"
    for text, members in _sorted(every, "text")[:DEAREST]:
        size = sum(each.bytes for each in members)
        yield f"  {100 * size / total:.0f} %: {text}"


def _messages(compiled: Compiled) -> str:
    """As how many messages the exchanges of a rank of this process run, where small ones are joined."""
    plan = compiled.plan.ranks[0]
    joined = [actor for actor in plan.actors if isinstance(actor, Communicate)]
    if all(len(actor.collectives) == 1 for actor in joined):
        return ""
    messages = counted(sum(actor.acts for actor in joined), "message")
    return f", which rank {plan.rank} joins into {messages}"


def _sorted(
    every: Iterable[Exchanged], name: Literal["group", "text"]
) -> list[tuple[str, list[Exchanged]]]:
    """Exchanges joined by an attribute, what sends most first."""
    found = defaultdict[str, list[Exchanged]](list)
    for each in every:
        found[getattr(each, name)].append(each)
    return sorted(found.items(), key=lambda item: -sum(each.bytes for each in item[1]))


def _number(every: Iterable[Exchanged], ranks: int) -> str:
    return _rounded(sum(len(each.kinds) * each.times * each.ranks for each in every), ranks)


def _rounded(total: int, ranks: int) -> str:
    """A mean over the ranks; in tenths where it is no whole number."""
    return f"{total // ranks}" if total % ranks == 0 else f"{total / ranks:.1f}"


def exchange_tables(graph: LogicalGraph) -> tuple[Table, ...]:
    """A row for each kind of exchange and dtype; none where nothing is exchanged."""
    moved = sorted(exchanged(graph).items())
    rows = [(kind, dtype, bytes_text(size)) for (kind, dtype), size in moved]
    columns = ("as", "dtype", "bytes")
    return (table("exchanges of a step", columns, rows),) if rows else ()


def exchanged(graph: LogicalGraph) -> Counter[tuple[str, str]]:
    """Bytes that all ranks together send in a step, by kind ("all_gather", "halo") and dtype."""
    loop, found = graph.loop, Counter[tuple[str, str]]()

    def times(name: str) -> int:
        return graph.micro_batches if name in loop else 1

    for node in graph.of_kind(Box):
        value, target = graph.values[node.input.name], node.output.laid
        for step in steps(value.laid, target, value.shape, ITEM_SIZE[value.dtype]):
            if step.kind in EXCHANGES and step.bytes:
                found[step.kind, value.dtype] += step.bytes * times(node.output.name)
    for halo, _ in graph_halos(graph):
        found["halo", halo.value.dtype] += halo.total * times(halo.value.name)
    return found
