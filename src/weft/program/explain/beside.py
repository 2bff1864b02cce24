"""Predicted beside measured seconds in `Program.explain`: of the step, and of every boxing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from weft.compiler.pipeline import Compiled
from weft.ir.logical import Box
from weft.ir.plan import Communicate, Exchange, RankPlan, Transfer
from weft.runtime.recording import Record
from weft.simulator.results.simulation import Simulation
from weft.units import Seconds, seconds_text

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
        compiled: the program.
        plan: of the rank.
        predicted: a step.
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
