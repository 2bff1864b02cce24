"""Pipelines of unit work, built by hand: stages on ranks round robin, one forward and one backward actor each."""

from __future__ import annotations

from dataclasses import dataclass, field

from build import value
from weft.compiler.schedule.actor_graph import ActorGraph
from weft.compiler.schedule.presets import Preset, with_priorities
from weft.ir.nodes import Phase
from weft.ir.plan import (
    Actor,
    Communicate,
    Compute,
    RankPlan,
    Register,
    RegisterKind,
    Transfer,
)


@dataclass
class _Rank:
    """A plan that grows."""

    rank: int
    micro_batches: int
    actors: list[Actor] = field(default_factory=list)
    makers: dict[str, int] = field(default_factory=dict)

    def compute(self, phase: Phase, reads: tuple[str, ...], makes: tuple[str, ...]) -> None:
        id, acts = len(self.actors), self.micro_batches
        self.makers.update(dict.fromkeys(makes, id))
        self.actors.append(Compute(id, (), reads, makes, acts=acts, phase=phase))

    def exchange(self, phase: Phase, queue: str, sent: str | None, got: str | None) -> None:
        id = len(self.actors)
        transfer = Transfer(0, value(sent) if sent else None, value(got) if got else None, (), ())
        self.actors.append(Communicate(id, (transfer,), queue, self.micro_batches, phase=phase))
        if got:
            self.makers[got] = id

    def plan(self, preset: Preset) -> RankPlan:
        readers: dict[str, list[int]] = {name: [] for name in self.makers}
        for actor in self.actors:
            for name in actor.consumes:
                readers[name].append(actor.id)
        registers = tuple(
            Register(value(name, 1000 if name[0] in "sd" else 4), KIND, maker, tuple(readers[name]))
            for name, maker in self.makers.items()
        )
        rated = tuple(
            Register(r.value, r.kind, r.producer, r.consumers, rate=self.micro_batches)
            for r in registers
        )
        actors = with_priorities(self.actors, preset)
        return RankPlan(self.rank, (), actors, rated, self.micro_batches)


KIND: RegisterKind = "activation"


def pipeline(
    preset: Preset,
    split: bool = False,
    seconds: dict[str, float] | None = None,
    transfer: float = 0.0,
) -> ActorGraph:
    """All ranks of a pipeline.

    Stage `s` keeps `s<s>` from forward to backward; `x<s>` goes on to the next stage, its gradient
    `g<s>` comes back; a split backward leaves `d<s>` for the weights' gradients. Nothing waits for the
    backward of stage 0: split, it is one actor for weights, of both durations.

    Args:
        preset: whose stages go round `preset.around` ranks.
        split: whether weights' gradients are actors of their own.
        seconds: of an act of each kind; 1 by default.
        transfer: seconds of a transfer.
    """
    ranks = [_Rank(rank, preset.micro_batches) for rank in range(preset.around)]
    last = preset.stages - 1
    for stage in range(preset.stages):
        here, phase = ranks[stage % preset.around], Phase(stage, "forward")
        if stage:
            before = ranks[(stage - 1) % preset.around]
            queue = f"comm:{before.rank}{here.rank}"
            before.exchange(phase, queue, f"x{stage - 1}", None)
            here.exchange(phase, queue, None, f"x{stage - 1}.at")
        reads = (f"x{stage - 1}.at",) if stage else ()
        here.compute(phase, reads, (f"s{stage}", *((f"x{stage}",) if stage < last else ())))
    for stage in reversed(range(preset.stages)):
        here, phase = ranks[stage % preset.around], Phase(stage, "backward")
        if stage < last:
            after = ranks[(stage + 1) % preset.around]
            queue = f"comm:{after.rank}{here.rank}"
            after.exchange(phase, queue, f"g{stage + 1}", None)
            here.exchange(phase, queue, None, f"g{stage + 1}.at")
        reads = (f"s{stage}", *((f"g{stage + 1}.at",) if stage < last else ()))
        makes = (f"g{stage}",) if stage else ()
        if split and not stage:
            phase = Phase(stage, "weight")
        here.compute(phase, reads, (*makes, f"d{stage}") if split and stage else makes)
        if split and stage:
            here.compute(Phase(stage, "weight"), (f"s{stage}", f"d{stage}"), ())
    plans = tuple(rank.plan(preset) for rank in ranks)
    lasts = seconds or {}

    def duration(actor: Actor) -> float:
        if not isinstance(actor, Compute):
            return transfer
        both = split and actor.phase == Phase(0, "weight")
        kinds = ("backward", "weight") if both else (actor.phase.kind,)
        return sum(lasts.get(kind, 1.0) for kind in kinds)

    return ActorGraph(
        plans, {plan.rank: [duration(actor) for actor in plan.actors] for plan in plans}
    )
