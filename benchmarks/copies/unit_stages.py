"""Pipelines of unit work as the compiler schedules them: stages on ranks, one forward and one backward actor each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

from weft.compiler.schedule.actor_graph import ActorGraph, Slot, with_copies
from weft.compiler.schedule.credits import preset_slots
from weft.compiler.schedule.presets import Preset, early_actors, with_priorities
from weft.ir.nodes import Phase
from weft.ir.plan import Actor, Communicate, Compute, LocalValue, RankPlan, Register, Transfer
from weft.simulator.timing.one_step import SimulatedStep, simulate_step
from weft.strategy.parts import Schedule
from weft.units import Seconds

# One stage a rank; two, round and round; two, there and back.
Layout: TypeAlias = Literal["one", "round", "v"]
# Bytes of what is kept, beside which what travels is small.
KEPT, SENT = 1000, 1


def homes(layout: Layout, ranks: int) -> tuple[int, ...]:
    """The rank of each stage."""
    there = tuple(range(ranks))
    return {"one": there, "round": there + there, "v": there + there[::-1]}[layout]


@final
@dataclass
class _Rank:
    """A plan that grows."""

    micro_batches: int
    actors: list[Actor] = field(default_factory=list)
    makers: dict[str, int] = field(default_factory=dict)

    def compute(self, phase: Phase, reads: Sequence[str], makes: Sequence[str]) -> None:
        number = len(self.actors)
        self.makers.update(dict.fromkeys(makes, number))
        acts = self.micro_batches
        self.actors.append(Compute(number, (), tuple(reads), tuple(makes), acts=acts, phase=phase))

    def exchange(self, phase: Phase, queue: str, sent: str | None, got: str | None) -> None:
        number = len(self.actors)
        given, made = (_value(name) if name else None for name in (sent, got))
        transfer = Transfer(0, given, made, (), ())
        self.actors.append(Communicate(number, (transfer,), queue, self.micro_batches, phase=phase))
        if got:
            self.makers[got] = number

    def plan(self, rank: int, rule: Preset) -> RankPlan:
        actors = with_priorities(self.actors, rule, early_actors(self.actors))
        registers = tuple(
            Register(
                _value(name),
                "activation",
                maker,
                tuple(actor.id for actor in actors if name in actor.consumes),
                rate=self.micro_batches,
            )
            for name, maker in self.makers.items()
        )
        return RankPlan(rank, (), actors, registers, self.micro_batches)


def _value(name: str) -> LocalValue:
    return LocalValue(name, (KEPT if name[0] in "sd" else SENT,), "float32")


def web(rule: Preset, layout: Layout, ranks: int, split: bool) -> ActorGraph:
    """All ranks: stage `s` keeps `s<s>` from forward to backward, hands `x<s>` on and `g<s>` back.

    A split backward leaves `d<s>` for the weights' part. Nothing waits for the backward of stage 0: split, it is all
    weights' part.
    """
    home, made = homes(layout, ranks), [_Rank(rule.micro_batches) for _ in range(ranks)]
    last = rule.stages - 1

    def pass_on(phase: Phase, sender: int, name: str) -> str:
        """Its name on the rank of the phase's stage."""
        one, other = home[sender], home[phase.stage]
        if one == other:
            return name
        queue = f"comm:{one}.{other}"
        made[one].exchange(phase, queue, name, None)
        made[other].exchange(phase, queue, None, f"{name}.at")
        return f"{name}.at"

    for stage in range(rule.stages):
        phase = Phase(stage, "forward")
        reads = [pass_on(phase, stage - 1, f"x{stage - 1}")] if stage else []
        makes = [f"s{stage}"] + ([f"x{stage}"] if stage < last else [])
        made[home[stage]].compute(phase, reads, makes)
    for stage in reversed(range(rule.stages)):
        phase = Phase(stage, "backward")
        reads = [f"s{stage}"]
        if stage < last:
            reads.append(pass_on(phase, stage + 1, f"g{stage + 1}"))
        rank, whole = made[home[stage]], not (split and stage)
        if split and not stage:
            phase = Phase(stage, "weight")
        makes = ([f"g{stage}"] if stage else []) + ([] if whole else [f"d{stage}"])
        rank.compute(phase, reads, makes)
        if not whole:
            rank.compute(Phase(stage, "weight"), [f"s{stage}", f"d{stage}"], [])
    plans = tuple(rank.plan(number, rule) for number, rank in enumerate(made))
    return ActorGraph(
        plans, {plan.rank: [_seconds(each, split) for each in plan.actors] for plan in plans}
    )


def _seconds(actor: Actor, split: bool) -> Seconds:
    """A second for a forward, and for each part of a backward."""
    if not isinstance(actor, Compute):
        return Seconds(0.0)
    both = actor.phase.kind != "forward" and (not split or not actor.phase.stage)
    return Seconds(2.0 if both else 1.0)


@final
@dataclass(frozen=True)
class Draft:
    """A schedule of the compiler's.

    Attributes:
        web: the plans before copies are given.
        given: the copies.
        plans, step: of all ranks, and as simulated.
    """

    web: ActorGraph
    given: Mapping[Slot, int]
    plans: tuple[RankPlan, ...]
    step: SimulatedStep

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.makespan

    @property
    def copies(self) -> dict[str, int]:
        """The copies of what each stage keeps, by its register."""
        return {name: count for (_, name), count in self.given.items() if name[0] == "s"}

    def kept(self, rank: int) -> int:
        """The most activations that a rank keeps at a time, from a forward's beginning to the last reader's end."""
        events = []
        for register in self.plans[rank].registers:
            if register.value.name[0] == "s":
                last = max(register.consumers)
                for act in self.step.timelines[rank]:
                    events += [(act.start, 1)] if act.actor == register.producer else []
                    events += [(act.end, -1)] if act.actor == last else []
        now = most = 0
        for _, change in sorted(events):
            now += change
            most = max(most, now)
        return most


def drafted(
    name: Schedule, layout: Layout, ranks: int, micro_batches: int, given: tuple[int, ...] = ()
) -> Draft:
    """The plans of a named schedule; with micro-batches in flight that are given the backward is split in any case."""
    rule = Preset(name, len(homes(layout, ranks)), ranks, micro_batches, given)
    made = web(rule, layout, ranks, bool(given) or rule.row.splits_weights)
    return _simulated(made, preset_slots(made, rule))


def _simulated(web: ActorGraph, copies: Mapping[Slot, int]) -> Draft:
    plans = tuple(with_copies(plan, copies) for plan in web.plans)
    return Draft(web, copies, plans, simulate_step(plans, web.seconds))
