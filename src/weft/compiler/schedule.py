"""Plans of all ranks together: priorities, copies, and the order of every communicator.

Before: the local programs of all ranks. After: their plans, rehearsed on one virtual clock
(`weft.actors.ensemble`), which found the orders and proved that they cannot hang. Every rank does
this for all ranks and gets the same. See docs/decisions/schedules.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.actors.ensemble import Rehearsal, perform
from weft.compiler.bucket import bucket
from weft.compiler.credit import credit
from weft.compiler.durations import Durations
from weft.compiler.liveness import prove_live
from weft.compiler.memory import memory
from weft.compiler.memory_order import Moment, moments_of
from weft.compiler.options import Options
from weft.compiler.prefetch import prefetch
from weft.compiler.schedule_copies import enough, fewest, of_preset
from weft.compiler.schedule_presets import Preset, computed, early_actors, preset, with_priorities
from weft.compiler.schedule_web import Slot, Web, with_copies
from weft.compiler.schedule_weights import split_backward
from weft.compiler.segment import segment
from weft.compiler.stages import Stages
from weft.hardware import usual_device
from weft.ir.nodes import Phase
from weft.ir.plan import COMPUTE, Communicator, Compute, LocalProgram, RankPlan
from weft.ir.verify_plan import verify_communicators, verify_plan

# Splitting the backward must shorten the step to this part of it to be worth more segments.
WORTH = 0.98


@dataclass(frozen=True)
class Scheduled:
    """What was decided about time.

    Attributes:
        name: of the preset, or "computed".
        plans: of all ranks, in the order of the programs.
        rehearsal: in the orders of the plans; None where nothing had to be decided.
    """

    name: str
    plans: tuple[RankPlan, ...]
    rehearsal: Rehearsal | None = None

    def moments(self, rank: int) -> tuple[Moment, ...] | None:
        """When the acts of a rank begin and end, in the order of time; None without a rehearsal."""
        return None if self.rehearsal is None else tuple(moments_of(self.rehearsal.timelines[rank]))


def plan_together(
    programs: Sequence[LocalProgram],
    communicators: tuple[Communicator, ...],
    stages: Stages,
    options: Options,
) -> Scheduled:
    """The plans of all ranks.

    With a named schedule, priorities and copies are its own (`schedule_presets.py`). Otherwise the
    backward goes first and there are as few copies as the busiest queue needs
    (`schedule_copies.enough`), and the backward is split into what other stages wait for and
    weights' gradients where the rehearsal shows that it shortens the step. One stage keeps the
    fewest copies that are live: micro-batches are there to save memory.

    Args:
        programs: of all ranks of the program.
        communicators: between them.
        stages: where they run.
        options: schedule, micro-batches, memory limit, buckets and ZeRO.

    Raises:
        StrategyError: when the schedule does not fit the stages.
        InternalError: when the plans would hang; the message names the circle.
    """
    making = _Making(communicators, stages, options)
    micro_batches = programs[0].micro_batches
    if options.schedule is not None:
        named = preset(options.schedule, stages, micro_batches)
        if named.name == "zero_bubble":
            programs = [split_backward(program) for program in programs]
        return making.with_preset(programs, named)
    rule = computed(stages, micro_batches)
    best = making.computed(programs, rule)
    if len(stages.placements) > 1 and micro_batches > 1:
        split = making.computed([split_backward(program) for program in programs], rule)
        best = making.better(best, split)
    return best


def plan_alone(
    programs: Sequence[LocalProgram],
    communicators: tuple[Communicator, ...],
    stages: Stages,
    options: Options,
) -> Scheduled:
    """The plans of some ranks of one stage that act once a step: each by itself, in the order of the graph."""
    plans = []
    for program in programs:
        buckets = bucket(program, options.bucket_bytes)
        actors = segment(program, buckets, communicators)
        plan = credit(program, *prefetch(program, actors, options.zero))
        prove_live(plan)
        verify_communicators(plan, communicators)
        plans.append(plan)
    return Scheduled("in the order of the graph", tuple(plans))


@dataclass(frozen=True)
class _Making:
    """How plans are made from programs."""

    communicators: tuple[Communicator, ...]
    stages: Stages
    options: Options
    durations: Durations = field(init=False)

    def __post_init__(self) -> None:
        device = usual_device(self.stages.placements[0].device_type)
        object.__setattr__(self, "durations", Durations(device, self.communicators))

    def with_preset(self, programs: Sequence[LocalProgram], named: Preset) -> Scheduled:
        web = self.web(programs, named)
        return self.rehearsed(named.name, web, of_preset(web, named))

    def computed(self, programs: Sequence[LocalProgram], rule: Preset) -> Scheduled:
        web = self.web(programs, rule)
        least = fewest(web)
        if len(self.stages.placements) == 1 or web.micro_batches == 1:
            return self.rehearsed("computed", web, least)
        return self.rehearsed("computed", web, enough(web, self.room(web, least)))

    def room(self, web: Web, least: Mapping[Slot, int]) -> dict[int, int] | None:
        """What the memory limit leaves to each rank above the fewest copies."""
        limit = self.options.memory_limit
        if limit is None:
            return None
        tight = self.rehearsed("fewest", web, least)
        peaks = {
            plan.rank: memory(plan, tight.moments(plan.rank)).memory.peak for plan in tight.plans
        }
        return {rank: limit - peak for rank, peak in peaks.items()}

    def better(self, plain: Scheduled, split: Scheduled) -> Scheduled:
        """The one with the shorter step that keeps the memory limit."""
        assert plain.rehearsal is not None
        assert split.rehearsal is not None
        shorter = split.rehearsal.makespan < plain.rehearsal.makespan * WORTH
        limit = self.options.memory_limit
        fits = limit is None or all(
            memory(plan, split.moments(plan.rank)).memory.peak <= limit for plan in split.plans
        )
        return split if shorter and fits else plain

    def web(self, programs: Sequence[LocalProgram], rule: Preset) -> Web:
        """The plans before copies and orders are given, and how long their acts take."""
        plans = tuple(self._plan(program, rule) for program in programs)
        seconds = {
            program.rank: self.durations.of(program, plan.actors)
            for program, plan in zip(programs, plans, strict=True)
        }
        return Web(plans, seconds)

    def _plan(self, program: LocalProgram, rule: Preset) -> RankPlan:
        staged = len(self.stages.placements) > 1
        buckets = bucket(program, self.options.bucket_bytes, staged)
        # After bucketing: a segment ends where a whole bucket can start, not at each of its parts.
        actors = segment(program, buckets, self.communicators, staged)
        actors = with_priorities(actors, rule, early_actors(actors))
        plan = credit(program, *prefetch(program, actors, self.options.zero))
        verify_communicators(plan, self.communicators)
        return plan

    def rehearsed(self, name: str, web: Web, copies: Mapping[Slot, int]) -> Scheduled:
        """Plans with copies and orders, proven live in just these orders."""
        plans = [with_copies(plan, copies) for plan in web.plans]
        found = perform(plans, web.seconds)
        fixed = tuple(verify_plan(replace(plan, orders=found.orders[plan.rank])) for plan in plans)
        return Scheduled(name, fixed, perform(fixed, web.seconds, fixed=True))


def busy(scheduled: Scheduled, rank: int) -> dict[Phase, float]:
    """Seconds of a step that a rank's compute queue works for each phase, as rehearsed."""
    found: dict[Phase, float] = {}
    if scheduled.rehearsal is not None:
        plan = next(plan for plan in scheduled.plans if plan.rank == rank)
        for act in scheduled.rehearsal.timelines[rank]:
            actor = plan.actors[act.actor]
            if isinstance(actor, Compute) and actor.queue == COMPUTE:
                found[actor.phase] = found.get(actor.phase, 0.0) + act.end - act.start
    return found


def bubble(scheduled: Scheduled, rank: int) -> float:
    """The part of the step's time in which a rank's compute queue has nothing to do, as rehearsed."""
    rehearsal = scheduled.rehearsal
    if rehearsal is None or not rehearsal.makespan:
        return 0.0
    return 1 - sum(busy(scheduled, rank).values()) / rehearsal.makespan


def in_flight(plan: RankPlan, stage: int) -> int:
    """How many micro-batches a stage can keep between forward and backward on a rank."""
    actors = plan.actors
    found = (
        register.credits
        for register in plan.registers
        for maker in (actors[register.producer],)
        if isinstance(maker, Compute) and maker.phase.stage == stage and register.rate > 1
        if maker.phase.kind == "forward"
        if any(
            isinstance(reader, Compute) and reader.phase.kind != "forward"
            for reader in (actors[id] for id in register.consumers)
        )
    )
    return max(found, default=1)
