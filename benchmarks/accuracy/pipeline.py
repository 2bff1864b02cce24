"""Seconds of a pipeline, simulated by weft's actors: a forward and a backward actor for each stage of a plan.

Priorities and the micro-batches in flight are those of `weft.compiler.schedule.presets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.compiler.schedule.presets import Preset, with_priorities
from weft.ir.nodes import Phase
from weft.ir.plan import Actor, Communicate, Compute, LocalValue, RankPlan, Register, Transfer
from weft.simulator.timing.one_step import simulate_step
from weft.strategy.parts import Schedule
from weft.units import Seconds

# Micro-batches for each stage after which a pipeline is steady.
STEADY = 3


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on one stage."""

    forward: float
    backward: float
    weight: float = 0.0


@dataclass
class _Rank:
    """A plan that grows, and the seconds of its actors."""

    rank: int
    micro_batches: int
    actors: list[Actor] = field(default_factory=list)
    seconds: list[Seconds] = field(default_factory=list)
    makers: dict[str, int] = field(default_factory=dict)

    def compute(
        self, phase: Phase, lasts: float, reads: tuple[str, ...], makes: tuple[str, ...]
    ) -> None:
        id = len(self.actors)
        self.makers.update(dict.fromkeys(makes, id))
        self.actors.append(Compute(id, (), reads, makes, acts=self.micro_batches, phase=phase))
        self.seconds.append(Seconds(lasts))

    def exchange(
        self, phase: Phase, queue: str, lasts: float, sent: str | None, got: str | None
    ) -> None:
        id = len(self.actors)
        given, taken = (LocalValue(name, (), "float32") if name else None for name in (sent, got))
        transfer = Transfer(0, given, taken, (), ())
        self.actors.append(Communicate(id, (transfer,), queue, self.micro_batches, phase=phase))
        self.seconds.append(Seconds(lasts))
        if got:
            self.makers[got] = id

    def plan(self, preset: Preset) -> RankPlan:
        readers: dict[str, list[int]] = {name: [] for name in self.makers}
        for actor in self.actors:
            for name in actor.consumes:
                readers[name].append(actor.id)
        registers = tuple(
            Register(
                LocalValue(name, (), "float32"),
                "activation",
                maker,
                tuple(readers[name]),
                _credits(name, preset),
                rate=self.micro_batches,
            )
            for name, maker in self.makers.items()
        )
        actors = with_priorities(self.actors, preset, frozenset())
        return RankPlan(self.rank, (), actors, registers, self.micro_batches)


def _credits(name: str, preset: Preset) -> int:
    """What a stage keeps from forward to backward has as many copies as it has micro-batches in flight."""
    kind, _, stage = name.partition("_")
    if kind in ("kept", "delta"):
        return preset.in_flight(int(stage))
    # What travels may wait: frameworks allocate it when it is sent.
    return preset.in_flight(int(stage)) + 1


def pipeline_seconds(
    stages: Sequence[StageTimes],
    micro_batches: int,
    transfers: Sequence[float],
    schedule: Schedule = "1f1b",
    around: int | None = None,
) -> float:
    """Seconds of the micro-batches of one step, from the first forward to the last backward.

    Args:
        stages: of the model, in order.
        micro_batches: of a step.
        transfers: seconds from each stage to the next, and back.
        schedule: the order of work.
        around: ranks; stages go round them.
    """
    count = len(stages)
    preset = Preset(schedule, count, around or count, micro_batches)
    splits = preset.row.splits_weights
    ranks = [_Rank(rank, micro_batches) for rank in range(preset.around)]
    for number, stage in enumerate(stages):
        _forward(ranks, number, stage, transfers, number == count - 1)
    for number in reversed(range(count)):
        _backward(ranks, number, stages[number], transfers, number == count - 1, splits)
    plans = tuple(rank.plan(preset) for rank in ranks)
    return simulate_step(plans, {rank.rank: rank.seconds for rank in ranks}).makespan


def steady_seconds(
    stages: Sequence[StageTimes],
    micro_batches: int,
    transfers: Sequence[float],
    schedule: str,
    around: int,
) -> float:
    """As `pipeline_seconds`, within half a percent: of many micro-batches some are simulated, the rest adds as much."""

    def simulated(count: int) -> float:
        return pipeline_seconds(stages, count, transfers, schedule, around)  # type: ignore[arg-type]  # a name of one

    if len(stages) == 1:
        return micro_batches * (stages[0].forward + stages[0].backward + stages[0].weight)
    most = STEADY * len(stages)
    if micro_batches <= 2 * most:
        return simulated(micro_batches)
    short, long = simulated(most), simulated(2 * most)
    return long + (micro_batches - 2 * most) * (long - short) / most


def _forward(
    ranks: list[_Rank], number: int, stage: StageTimes, transfers: Sequence[float], last: bool
) -> None:
    here, phase = ranks[number % len(ranks)], Phase(number, "forward")
    if number:
        before = ranks[(number - 1) % len(ranks)]
        queue, lasts = f"comm:{before.rank}{here.rank}1", transfers[number - 1]
        before.exchange(phase, queue, lasts, f"out_{number - 1}", None)
        here.exchange(phase, queue, lasts, None, f"in_{number}")
    reads = (f"in_{number}",) if number else ()
    here.compute(
        phase, stage.forward, reads, (f"kept_{number}", *(() if last else (f"out_{number}",)))
    )


def _backward(
    ranks: list[_Rank],
    number: int,
    stage: StageTimes,
    transfers: Sequence[float],
    last: bool,
    splits: bool,
) -> None:
    here, phase = ranks[number % len(ranks)], Phase(number, "backward")
    if not last:
        after = ranks[(number + 1) % len(ranks)]
        queue, lasts = f"comm:{after.rank}{here.rank}2", transfers[number]
        after.exchange(phase, queue, lasts, f"grad_{number + 1}", None)
        here.exchange(phase, queue, lasts, None, f"back_{number}")
    reads = (f"kept_{number}", *(() if last else (f"back_{number}",)))
    makes = (f"grad_{number}",) if number else ()
    if not splits:
        both = replace(stage, backward=stage.backward + stage.weight)
        here.compute(phase, both.backward, reads, makes)
        return
    here.compute(phase, stage.backward, reads, (*makes, f"delta_{number}"))
    kept = (f"kept_{number}", f"delta_{number}")
    here.compute(Phase(number, "weight"), stage.weight, kept, ())
