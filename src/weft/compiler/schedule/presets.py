"""The named schedules, expressed as priorities of phases and numbers of micro-batches in flight per stage.

GPipe (Huang et al. 2019), 1F1B (PipeDream, Narayanan et al. 2019), interleaved 1F1B (Megatron-LM,
Narayanan et al. 2021, section 2.2), zero bubble (Qi et al. 2024, schedule ZB-H1). There is no
list of acts: actors act when they can, those of high priority first, and registers with few copies hold them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from weft.compiler.context import Context, Stages
from weft.errors import StrategyError
from weft.ir.nodes import Phase, PhaseKind
from weft.ir.plan import Actor, Communicate, Compute, Feed, Transfer
from weft.strategy.parts import Schedule


@final
@dataclass(frozen=True)
class NamedSchedule:
    """A row of the table of named schedules.

    Attributes:
        order: the kinds of phases, first those that go first when several may act.
        in_flight: of a preset and a stage, the number of micro-batches that may be between the stage's forward and
            the end of its backward.
        splits_weights: true if the gradients of weights are split from the backward.
        takes_turns: true if ranks run several stages, and take turns between them.
    """

    order: tuple[PhaseKind, PhaseKind, PhaseKind]
    in_flight: Callable[[Preset, int], int]
    splits_weights: bool = False
    takes_turns: bool = False


@final
@dataclass(frozen=True)
class Preset:
    """A named schedule on given stages.

    Attributes:
        name: which.
        around: number of stages after which they begin again on the same ranks.
        given: for each stage, the micro-batches in flight, in place of those of the schedule; () for these.
    """

    name: Schedule
    stages: int
    around: int
    micro_batches: int
    given: tuple[int, ...] = ()

    @property
    def row(self) -> NamedSchedule:
        """The facts of the schedule that do not depend on stages."""
        return PRESETS[self.name]

    def in_flight(self, stage: int) -> int:
        """The number of micro-batches that may be between a stage's forward and the end of its backward."""
        found = self.given[stage] if self.given else self.row.in_flight(self, stage)
        return max(1, min(found, self.micro_batches))

    def priority(self, phase: Phase) -> int:
        """The priority of a phase: a lower one goes first. Among equal kinds the later stage goes first."""
        kind = self.row.order.index(phase.kind)
        return 1 + kind * self.stages + self.stages - 1 - phase.stage


def interleaved_in_flight(stage: int, stages: int, around: int, micro_batches: int) -> int:
    """The most micro-batches that one of several stages of a rank has in flight in Megatron's interleaved schedule.

    Its rank goes through groups of `around` micro-batches, stage after stage; it is ahead by
    `2 (around - place - 1) + (chunks - 1) around` forward acts, and then alternates.
    """
    chunks, place, own = stages // around, stage % around, stage // around
    total = chunks * micro_batches
    ahead = min(total, 2 * (around - place - 1) + (chunks - 1) * around)
    acts = [(number // around) % chunks for number in range(total)]
    held = most = 0
    for number in range(total + ahead):
        if number < total:
            held += acts[number] == own
        most = max(most, held)
        if number >= ahead:
            held -= chunks - 1 - acts[number - ahead] == own
    return most


PRESETS: Mapping[Schedule, NamedSchedule] = {
    "gpipe": NamedSchedule(
        ("forward", "backward", "weight"), lambda preset, _: preset.micro_batches
    ),
    "1f1b": NamedSchedule(
        ("backward", "forward", "weight"), lambda preset, stage: preset.stages - stage
    ),
    "interleaved": NamedSchedule(
        ("forward", "backward", "weight"),
        lambda preset, stage: interleaved_in_flight(
            stage, preset.stages, preset.around, preset.micro_batches
        ),
        takes_turns=True,
    ),
    # As much as 1F1B's first stage: later ones put the gradients of their weights off.
    "zero_bubble": NamedSchedule(
        ("backward", "forward", "weight"), lambda preset, _: preset.stages, splits_weights=True
    ),
}


def turning_stage(context: Context) -> int | None:
    """The stage in which the backward of a micro-batch soon follows its forward: the last; None if there is none.

    GPipe makes all forwards first. If ranks take turns, gathering once for both held up to 13 % less memory than
    gathering twice, and took as long (GPT of 12 layers, ZeRO 3, 4 stages on 2 groups of 4 H100, 2 to 16
    micro-batches).
    """
    options, last = context.options, len(context.stages.placements) - 1
    if last < 1:
        return 0
    several = options.in_flight is not None and options.in_flight[-1] > 1
    return None if options.schedule == "gpipe" or several else last


def preset(
    name: Schedule, stages: Stages, micro_batches: int, given: Sequence[int] | None = None
) -> Preset:
    """A named schedule for the stages of a program.

    Args:
        given: for each stage, the micro-batches in flight; None for those of the schedule.

    Raises:
        StrategyError: when its ranks take turns between several stages, and none has several.
    """
    count, around = len(stages.placements), stages_around(stages)
    if PRESETS[name].takes_turns and around == count:
        raise StrategyError(
            f'schedule="{name}" needs several stages on each rank, such as stages=4 on 2 ranks, '
            f'got {count} on ranks of their own; "1f1b" does without'
        )
    return Preset(name, count, around, micro_batches, tuple(given or ()))


def computed(stages: Stages, micro_batches: int, given: Sequence[int] | None = None) -> Preset:
    """The priorities of computed schedules; their copies are computed, unless they are given."""
    count, around = len(stages.placements), stages_around(stages)
    name: Schedule = "zero_bubble" if around == count else "interleaved"
    return Preset(name, count, around, micro_batches, tuple(given or ()))


def stages_around(stages: Stages) -> int:
    """The number of stages after which the ranks of the first run another one; all if none does."""
    first, count = stages.placements[0], len(stages.placements)
    return next((n for n in range(1, count) if stages.placements[n] == first), count)


def with_priorities(actors: Sequence[Actor], preset: Preset) -> tuple[Actor, ...]:
    """The actors of a rank with the priorities of a schedule.

    Work that runs once a step goes first when the loop waits for it, and last otherwise. If ranks have one stage
    each, a forward that has begun is ended before a backward continues: the next stage waits for it.
    """
    # Actors that act once a step and whose results some actor of the loop reads, directly or not.
    makers, early = {name: actor.id for actor in actors for name in actor.produces}, set[int]()
    for actor in reversed(actors):
        if actor.acts > 1 or actor.id in early:
            ids = {makers[name] for name in actor.consumes if name in makers}
            early |= {id for id in ids if id < actor.id and actors[id].acts == 1}
    last = 1 + 3 * preset.stages
    alone = preset.around == preset.stages > 1
    begun = _continuing_forwards(actors) if alone else frozenset()

    def priority(actor: Compute | Communicate) -> int:
        if actor.acts > 1 or preset.micro_batches == 1:
            return 0 if actor.id in begun else preset.priority(actor.phase)
        return 0 if actor.id in early else last

    return tuple(
        replace(actor, priority=priority(actor))
        if isinstance(actor, Compute | Communicate)
        else actor
        for actor in actors
    )


def _continuing_forwards(actors: Sequence[Actor]) -> frozenset[int]:
    """The actors of a forward that continue with what others of it made of the values that it waits for.

    These are what the stage before sends, and in the first stage the batch.
    """
    forward = [
        each
        for each in actors
        if isinstance(each, Compute | Communicate)
        and each.phase.kind == "forward"
        and each.acts > 1
    ]
    received = {
        name
        for each in forward
        if isinstance(each, Communicate) and isinstance(each.collectives[0], Transfer)
        for name in each.produces
    }
    fed = {name for each in actors if isinstance(each, Feed) for name in each.produces}
    made, begun, comes = set[str](), set[int](), received or fed
    for each in forward:
        if not made.isdisjoint(each.consumes):
            begun.add(each.id)
        if not (made | comes).isdisjoint(each.consumes):
            made.update(each.produces)
    return frozenset(begun)
