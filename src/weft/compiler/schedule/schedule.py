"""The plans of ranks: of all together, with priorities, copies, and the order of every communicator.

Before: the local programs of all ranks, of which those that are alike have one representative
(`schedule/equal_ranks/`). After: their plans, simulated on one virtual clock (`weft.simulator.clock`), which found
the orders; `Scheduled.simulation` proves that they cannot hang. Every rank does this for all ranks and gets the same.
See docs/decisions/schedules.md. Ranks of one stage that acts once a step are planned without the others: they
act in the order of the graph, and nothing has to be simulated.

Calls of the loop on which nothing in another stage depends before its end have the kind "weight" in place of
"backward": they may fill gaps (zero bubble pipelines, Qi et al. 2024, section 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import final

from weft.cached import cached_property
from weft.compiler.context import Context
from weft.compiler.memory.order import Moment, moments_of
from weft.compiler.memory.walk import memory
from weft.compiler.schedule.actor_graph import ActorGraph, Slot, prove_live, with_copies
from weft.compiler.schedule.credits import enough_slots, fewest_slots, preset_slots
from weft.compiler.schedule.draft import PlanDraft, PlanPass, run_on_draft
from weft.compiler.schedule.equal_ranks.rank_classes import like
from weft.compiler.schedule.presets import Preset, computed, preset
from weft.hardware.durations import Durations
from weft.ir.legal.plans import COPY_RULES, verify_plan
from weft.ir.legal.tables import verify_local
from weft.ir.nodes import Phase
from weft.ir.plan import (
    COMPUTE,
    Collective,
    Communicator,
    Compute,
    LocalCall,
    LocalNode,
    LocalProgram,
    RankPlan,
)
from weft.simulator.clock import SimulatedStep, Timed, simulate_step
from weft.units import Bytes, Seconds

# Splitting the backward must shorten the step to this part of it to be worth more segments.
WORTH = 0.98


def plan_ranks(
    rows: Sequence[PlanPass],
    programs: Sequence[LocalProgram],
    communicators: tuple[Communicator, ...],
    context: Context,
    classes: Mapping[int, int],
    families: Mapping[int, Sequence[int]],
) -> Scheduled:
    """The plans of all ranks that have a program.

    Without `classes`, each rank by itself, in the order of the graph. Else all together. With a named schedule,
    priorities and copies are its own (`schedule/presets.py`), but for micro-batches in flight that are given. Otherwise
    there are as few copies as the busiest queue needs (`schedule/credits.py`). If simulations show that it shortens
    the step, weights' gradients are split from the backward, and copies are those of zero bubble or, with several
    stages on a rank, of the interleaved schedule. One stage keeps the fewest copies that are live: micro-batches are
    there to save memory.

    Args:
        rows: the passes that make the plan of a rank.
        programs: of the first rank of each class, and of others that a plan is wanted for.
        classes: for each rank, the first of those that are like it; empty for one stage that acts once a step.
        families: for each communicator, those that run the same exchange at the same time.

    Raises:
        StrategyError: when the schedule does not fit the stages, or a stage must hold more than it was given.
        InternalError: when the plans would hang; the message names the cycle.
    """
    planner = _RanksPlanner(
        rows, communicators, context, Durations(context.costs, communicators, families)
    )
    if not classes:
        plans = tuple(prove_live(planner.plan(program)) for program in programs)
        return Scheduled("in the order of the graph", plans)
    first = [program for program in programs if classes[program.rank] == program.rank]
    named = context.options.schedule
    asked = context.stages, programs[0].micro_batches, context.options.in_flight
    rule = computed(*asked) if named is None else preset(named, *asked)
    found = reduce(planner.better, planner.candidates(first, rule))
    orders = found.simulation.orders
    ready = {
        p.rank: verify_plan(replace(p, orders=orders[p.rank]), COPY_RULES) for p in found.plans
    }
    for program in programs:
        if program.rank not in ready:
            # The other programs get the copies and orders of those that stand for them.
            own = planner.plan(split_backward(program) if found.split else program, rule)
            ready[program.rank] = like(own, ready[classes[program.rank]])
    plans = tuple(ready[program.rank] for program in programs)
    return Scheduled(rule.name if named else "computed", plans, found.graph.seconds, classes)


@final
@dataclass(frozen=True)
class PlansCandidate:
    """Plans with register copies, before the order of communicators is fixed.

    Attributes:
        graph: the plans before that.
        split: true if weights' gradients are split from the backward.
        plans, simulation: with copies.
    """

    graph: ActorGraph
    split: bool
    plans: tuple[RankPlan, ...]
    simulation: SimulatedStep

    @staticmethod
    def of(graph: ActorGraph, split: bool, copies: Mapping[Slot, int]) -> PlansCandidate:
        """Plans with copies, simulated."""
        plans = tuple(with_copies(plan, copies) for plan in graph.plans)
        return PlansCandidate(graph, split, plans, simulate_step(plans, graph.seconds))

    def peaks(self) -> dict[int, Bytes]:
        """The most bytes that each rank holds."""
        lines = self.simulation.timelines
        return {p.rank: memory(p, moments_of(lines[p.rank])).memory.peak for p in self.plans}


@final
@dataclass(frozen=True)
class _RanksPlanner:
    rows: Sequence[PlanPass]
    communicators: tuple[Communicator, ...]
    context: Context
    durations: Durations

    def candidates(
        self, programs: Sequence[LocalProgram], rule: Preset
    ) -> Iterator[PlansCandidate]:
        """The plans among which is chosen: each must be better than those before it to be worth it."""
        splits, limit = rule.row.splits_weights, self.context.options.memory_limit
        if self.context.options.schedule is not None:
            graph = self.graph(programs, rule, splits)
            yield PlansCandidate.of(graph, splits, preset_slots(graph, rule))
            return
        whole = self.graph(programs, rule)
        if len(self.context.stages.placements) == 1 or whole.micro_batches == 1:
            yield PlansCandidate.of(whole, False, fewest_slots(whole))
            return
        both = (whole, False), (self.graph(programs, rule, split=True), True)
        for graph, split in both if not rule.given else ():
            # As many copies as pay and the memory limit leaves room for, above the fewest.
            room = None
            if limit is not None:
                held = PlansCandidate.of(graph, split, fewest_slots(graph)).peaks()
                room = {rank: Bytes(limit - peak) for rank, peak in held.items()}
            yield PlansCandidate.of(graph, split, enough_slots(graph, room))
        for graph, split in both:
            if split or rule.given or not splits:
                yield PlansCandidate.of(graph, split, preset_slots(graph, rule))

    def better(self, old: PlansCandidate, new: PlansCandidate) -> PlansCandidate:
        """The new one, if its step is shorter and it keeps the memory limit."""
        limit = self.context.options.memory_limit
        if new.simulation.makespan >= old.simulation.makespan * WORTH:
            return old
        return new if limit is None or max(new.peaks().values()) <= limit else old

    def graph(
        self, programs: Sequence[LocalProgram], rule: Preset, split: bool = False
    ) -> ActorGraph:
        """The plans before copies and orders are given, and how long their acts take."""
        parts = [verify_local(split_backward(each)) if split else each for each in programs]
        plans = tuple(self.plan(program, rule) for program in parts)
        seconds = {
            program.rank: self.durations.of(program, plan.actors)
            for program, plan in zip(parts, plans, strict=True)
        }
        return ActorGraph(plans, seconds)

    def plan(self, program: LocalProgram, rule: Preset | None = None) -> RankPlan:
        """The plan of one rank: with the priorities of a schedule, or in the order of the graph."""
        draft = PlanDraft(program, self.communicators, rule)
        made = self.context.cache.of(run_on_draft, self.rows, draft, self.context, at=program.rank)
        assert made.plan is not None  # the last pass makes it
        return made.plan


def split_backward(program: LocalProgram) -> LocalProgram:
    """The program with weights' gradients told apart; the same without micro-batches."""
    awaited: set[str] = set()
    found: list[LocalNode] = []
    stages = {value.name: node.phase.stage for node in program.nodes for value in node.makes}
    for node in reversed(program.nodes):
        made = [value.name for value in node.makes]
        needed = not awaited.isdisjoint(made)
        looped = not program.loop.isdisjoint((*node.reads, *made))
        if looped:
            awaited.update(
                name
                for name in node.reads
                if needed or stages.get(name, node.phase.stage) != node.phase.stage
            )
        if looped and not needed and node.phase.kind == "backward":
            phase = Phase(node.phase.stage, "weight")
            if isinstance(node, LocalCall):
                node = node.changed(phase=phase)
            elif isinstance(node, Collective):
                node = replace(node, phase=phase)
        found.append(node)
    return program.with_nodes(reversed(found))


@final
@dataclass(frozen=True)
class Scheduled:
    """The decisions about time.

    Attributes:
        plans: of the ranks that were planned: of each class of equal ranks the first, and those
            that were asked for.
        seconds: how long acts of the first of each class take; nothing if nothing had to be decided.
        classes: for each rank of the program, the first of those that are like it (`schedule/equal_ranks/`).
    """

    name: str
    plans: tuple[RankPlan, ...]
    seconds: Mapping[int, Sequence[Seconds]] = field(default_factory=dict)
    classes: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def simulation(self) -> SimulatedStep | None:
        """A step in the orders of the plans, of the first of each class, on first use.

        None if nothing had to be decided.

        Raises:
            InternalError: the plans would hang; the message names the acts that wait for each other.
        """
        if not self.seconds:
            return None
        first = [plan for plan in self.plans if self.classes[plan.rank] == plan.rank]
        return simulate_step(first, self.seconds, fixed=True)

    def prove_live(self) -> None:
        """Prove that the plans cannot hang.

        Raises:
            InternalError: they would.
        """
        _ = self.simulation

    def timeline(self, rank: int) -> tuple[Timed, ...]:
        """The acts of a rank, as simulated; none without a simulation."""
        if self.simulation is None:
            return ()
        return self.simulation.timelines[self.classes[rank]]

    def moments(self, rank: int) -> tuple[Moment, ...] | None:
        """The moments at which the acts of a rank begin and end, in the order of time; None without a simulation."""
        return None if self.simulation is None else tuple(moments_of(self.timeline(rank)))


def busy(scheduled: Scheduled, rank: int) -> dict[Phase, Seconds]:
    """Seconds of a step that a rank's compute queue works for each phase, as simulated."""
    found: dict[Phase, Seconds] = {}
    if scheduled.simulation is not None:
        first = scheduled.classes[rank]
        plan = next(plan for plan in scheduled.plans if plan.rank == first)
        for act in scheduled.timeline(rank):
            actor = plan.actors[act.actor]
            if isinstance(actor, Compute) and actor.queue == COMPUTE:
                before = found.get(actor.phase, 0.0)
                found[actor.phase] = Seconds(before + act.end - act.start)
    return found


def bubble(scheduled: Scheduled, rank: int) -> float:
    """The part of the step's time in which a rank's compute queue has nothing to do, as simulated."""
    simulation = scheduled.simulation
    if simulation is None or not simulation.makespan:
        return 0.0
    return 1 - sum(busy(scheduled, rank).values()) / simulation.makespan


def in_flight(plan: RankPlan, stage: int) -> int:
    """The number of micro-batches that a stage can keep between forward and backward on a rank."""
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
