"""The costs of the acts of a planned step, call by call; given ones in the place of a machine's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import NamedTuple, TypeAlias, final

from weft.errors import UserError
from weft.hardware.costs import Cost, CostOverrides, Costs
from weft.hardware.durations import Durations, makers_of
from weft.ir.plan import Actor, Communicate, Compute, LocalCall, LocalUpdate, RankPlan, Transfer
from weft.patterns import around, matches
from weft.simulator.planned import PlannedStep, Transfers, values_of
from weft.traces.events import Lines
from weft.units import Seconds

Part: TypeAlias = "LocalCall | LocalUpdate | Communicate"


@final
class PartCost(NamedTuple):
    """A call, an update, or a whole communication, and what one of it costs."""

    part: Part
    cost: Cost


@final
@dataclass(frozen=True)
class ActCosts:
    """The costs of one act of each actor.

    Attributes:
        parts: of each planned rank and actor; none of those that take no time.
        overhead: of the host for an act, on each planned rank.
    """

    parts: Mapping[int, Sequence[Sequence[PartCost]]]
    overhead: Mapping[int, Seconds] = field(default_factory=dict)

    def seconds(self, rank: int) -> tuple[Seconds, ...]:
        """Seconds of an act of each actor of a rank."""
        return tuple(
            Seconds(sum((one.cost.seconds for one in own), 0.0) + self.overhead.get(rank, 0.0))
            if own
            else Seconds(0.0)
            for own in self.parts[rank]
        )

    def deviation(self, rank: int, actor: int) -> float:
        """Standard deviation of the seconds of an act: those of its calls are independent."""
        return sqrt(sum((c.seconds * c.spread) ** 2 for _, c in self.parts[rank][actor]))

    @property
    def estimates(self) -> tuple[str, ...]:
        """The figures that were missing, those that count for most parts first."""
        found = Counter(
            part.cost.estimate
            for actors in self.parts.values()
            for own in actors
            for part in own
            if part.cost.estimate
        )
        return tuple(
            text for text, _ in sorted(found.items(), key=lambda each: (-each[1], each[0]))
        )


def act_costs(step: PlannedStep, costs: Costs) -> ActCosts:
    """The costs of the acts of all planned ranks, on a machine."""
    pricing = _Pricing(step, costs)
    parts = {plan.rank: pricing.of(plan) for plan in step.plans}
    return ActCosts(parts, {plan.rank: costs.of_act(plan.rank) for plan in step.plans})


@final
class _Pricing:
    """Gives acts their costs."""

    def __init__(self, step: PlannedStep, costs: Costs) -> None:
        self._durations = Durations(costs, step.communicators, step.families)
        self._transfers = Transfers(step, costs)

    def of(self, plan: RankPlan) -> tuple[tuple[PartCost, ...], ...]:
        values = values_of(plan)
        computes = (actor for actor in plan.actors if isinstance(actor, Compute))
        makers = makers_of(node for actor in computes for node in actor.nodes)

        def parts(actor: Actor) -> tuple[PartCost, ...]:
            match actor:
                case Compute():
                    costs = self._durations.of_act(actor, values, plan.rank, makers)
                    return tuple(map(PartCost, actor.nodes, costs))
                case Communicate() if isinstance(actor.collectives[0], Transfer):
                    return (PartCost(actor, self._transfers.cost(plan.rank, actor)),)
                case Communicate():
                    cost = self._durations.communication(actor.collectives, plan.rank)
                    return (PartCost(actor, cost),)
            return ()

        return tuple(map(parts, plan.actors))


# The place of a part: its actor, and which of its parts.
_Place: TypeAlias = "tuple[int, int]"


def with_overrides(
    acts: ActCosts, given: CostOverrides, plans: Sequence[RankPlan], lines: Lines
) -> ActCosts:
    """The costs of acts, with the user's overrides.

    Args:
        acts: the costs on a machine.
        given: the overrides.
        plans: that run.
        lines: the user's line of each value, with its module.

    Raises:
        UserError: when an override names something that is not in the plans.
    """
    used = _Used(given)
    parts = {
        plan.rank: _Giving(plan, given, lines, used).apply(acts.parts[plan.rank]) for plan in plans
    }
    used.check()
    return replace(acts, parts=parts)


@final
@dataclass(frozen=True)
class _Used:
    """The cost overrides that something took; and all names that could have been given."""

    given: CostOverrides
    found: set[tuple[str, str]] = field(default_factory=set)
    there: dict[str, dict[str, None]] = field(default_factory=dict)

    def note(self, kind: str, name: str) -> None:
        self.found.add((kind, name))

    def offer(self, kind: str, name: str) -> None:
        self.there.setdefault(kind, {})[name] = None

    def check(self) -> None:
        """Refuse costs of what there is not; kinds of exchanges are known, those that a plan lacks may be given."""
        for kind, names in (
            ("ops", self.given.ops),
            ("modules", self.given.modules),
            ("stages", self.given.stages),
        ):
            for name in names:
                if (kind, name) not in self.found and name != "*":
                    if name in self.there.get(kind, {}):
                        raise UserError(
                            f"{self.given.source}: {kind}: {name!r} is hidden by a pattern before it; put it first"
                        )
                    there = ", ".join(sorted({*self.there.get(kind, {})} - {""})[:8]) or "none"
                    raise UserError(
                        f"{self.given.source}: {kind}: {name!r} is nowhere in the plan; there are {there}"
                    )


@final
@dataclass(frozen=True)
class _Giving:
    """Gives the parts of one rank's acts their costs."""

    plan: RankPlan
    given: CostOverrides
    lines: Lines
    used: _Used

    def apply(self, parts: Sequence[Sequence[PartCost]]) -> tuple[tuple[PartCost, ...], ...]:
        found = [
            list(self._single(actor, own))
            for actor, own in zip(self.plan.actors, parts, strict=True)
        ]
        modules, stages = self._groups(found)
        for (pattern, kind), instances in modules.items():
            for places in instances.values():
                self._scale(found, places, self._target(self.given.modules[pattern], kind))
        for (stage, kind), places in stages.items():
            self._scale(found, places, self._target(self.given.of_stage(stage), kind))
        return tuple(map(tuple, found))

    def _single(self, actor: Actor, own: Sequence[PartCost]) -> Iterator[PartCost]:
        for one in own:
            name, sent = part_name(one.part), isinstance(one.part, Communicate)
            kind, table = ("exchanges", self.given.exchanges) if sent else ("ops", self.given.ops)
            self.used.offer(kind, name)
            if name in table:
                self.used.note(kind, name)
                yield PartCost(one.part, Cost(table[name]))
            else:
                yield one

    def _groups(
        self, found: Sequence[Sequence[PartCost]]
    ) -> tuple[
        Mapping[tuple[str, str], Mapping[str, list[_Place]]], Mapping[tuple[int, str], list[_Place]]
    ]:
        """The places of what belongs together: to one module that a pattern names, and to each stage."""
        modules: dict[tuple[str, str], dict[str, list[_Place]]] = {}
        stages: dict[tuple[int, str], list[_Place]] = {}
        for actor, own in zip(self.plan.actors, found, strict=True):
            if not isinstance(actor, Compute):
                continue
            stage, number = actor.phase.stage, str(actor.phase.stage)
            self.used.offer("stages", number)
            given = self.given.of_stage(stage)
            for place, one in enumerate(own):
                kind, module = self._work(actor, one.part)
                if key := _override_kind(kind, given):
                    self.used.note("stages", number)
                    stages.setdefault((stage, key), []).append((actor.id, place))
                pattern, instance = self._named(module)
                names = self.given.modules.get(pattern, {})
                if key := _override_kind(kind, names):
                    self.used.note("modules", pattern)
                    of = modules.setdefault((pattern, key), {})
                    of.setdefault(instance, []).append((actor.id, place))
        return modules, stages

    def _work(self, actor: Compute, part: Part) -> tuple[str, str]:
        if isinstance(part, LocalUpdate):
            return "update", part.key.rpartition(".")[0]
        made = part.makes if isinstance(part, LocalCall) else ()
        location = next((self.lines[v.name] for v in made if v.name in self.lines), None)
        kind = str(actor.phase.kind)
        if location is None:
            return kind, ""
        self.used.offer("modules", location.module)
        if kind == "forward" and location.backward:
            kind = "backward"
        return kind, location.module

    def _named(self, module: str) -> tuple[str, str]:
        """The outermost module around a path that a pattern names."""
        for one in around(module):
            for pattern in self.given.modules:
                if matches(pattern, one):
                    return pattern, one
        return "", ""

    def _target(self, given: Mapping[str, Seconds], kind: str) -> float:
        if kind == "update":
            return given[kind]
        seconds = float(given[kind])
        if kind == "backward" and not any(
            isinstance(a, Compute) and a.phase.kind == "weight" for a in self.plan.actors
        ):
            seconds += given.get("weight", 0.0)
        return seconds * self.plan.micro_batches

    def _scale(self, found: list[list[PartCost]], places: Sequence[_Place], target: float) -> None:
        """Let parts together take so many seconds of a step, in proportion to what they took."""
        acts = [self.plan.actors[actor].acts for actor, _ in places]
        took = [found[actor][place].cost.seconds for actor, place in places]
        total = sum(times * each for times, each in zip(acts, took, strict=True))
        for (actor, place), each in zip(places, took, strict=True):
            lasts = each * target / total if total else target / sum(acts)
            part = found[actor][place].part
            found[actor][place] = PartCost(part, Cost(Seconds(lasts)))


def part_name(part: Part) -> str:
    """The op, the update's rule, or the kind of communication."""
    if isinstance(part, Communicate):
        return str(part.collectives[0].kind)
    return f"{part.rule} update" if isinstance(part, LocalUpdate) else part.op


def _override_kind(kind: str, given: Mapping[str, Seconds]) -> str:
    """Under which name the seconds of a kind of work are given; empty if they are not.

    Where gradients of weights have no seconds of their own, they are part of the backward.
    """
    if kind in given:
        return kind
    return "backward" if kind == "weight" and "backward" in given else ""
