"""Snapshots of queues, and the words in which a hang is reported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from weft.actors.messages import Act
from weft.ir.plan import Actor, Communicate, Compute, RankPlan


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """An actor whose next act, for step `step`, has to wait.

    Attributes:
        actor: id of the actor.
        step: the step that it would act for.
        micro: the micro-batch of that step.
        versions: consumed registers that have no unread version.
        copies: produced registers that have no free copy.
    """

    actor: int
    step: int
    versions: tuple[str, ...]
    copies: tuple[str, ...]
    micro: int = 0


@final
@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """State of one queue: steps begun, acts started, what runs now, and who waits for what.

    An entry of `waiting` that lacks nothing waits for its turn on the queue; `turn` is the actor
    that runs there or must act next, if one must.
    """

    queue: str
    begun: int
    started: int
    running: Act | None
    waiting: tuple[Waiting, ...]
    turn: int | None = None

    @property
    def idle(self) -> bool:
        """True when every actor has acted for every step begun."""
        return self.running is None and not self.waiting


def actor_text(actor: Actor) -> str:
    """An actor in words: "Compute 7 on compute (aten.mm.default … +3)"."""
    return f"{type(actor).__name__} {actor.id} on {actor.queue}{_content(actor)}"


def waiting_text(plan: RankPlan, statistics: Iterable[QueueStatistics]) -> str:
    """The acts that run and those that wait on the queues of a rank, as text, one line each."""
    lines = []
    for queue in statistics:
        if queue.running is not None:
            actor = plan.actors[queue.running.actor]
            when = when_text(actor, queue.running.step, queue.running.micro)
            lines.append(f"{actor_text(actor)} acts for {when}")
        lines += [_waiting_line(plan, waiting) for waiting in queue.waiting]
    return "\n".join(f"  rank {plan.rank}: {line}" for line in lines)


def _content(actor: Actor) -> str:
    if isinstance(actor, Communicate):
        first = actor.collectives[0]
        more = f" +{len(actor.collectives) - 1}" if len(actor.collectives) > 1 else ""
        into = f"into {', '.join(value.name for value in first.makes)}"
        what = f"of {', '.join(first.reads)}" if first.reads else into
        return f" ({first.kind} {what}{more})"
    if isinstance(actor, Compute) and actor.nodes:
        first_node = actor.nodes[0]
        name = getattr(first_node, "op", None) or f"{getattr(first_node, 'rule', '')} update"
        more = f" +{len(actor.nodes) - 1}" if len(actor.nodes) > 1 else ""
        return f" ({name}{more})"
    return ""


def _waiting_line(plan: RankPlan, waiting: Waiting) -> str:
    registers = {register.value.name: register for register in plan.registers}
    needs = [
        f"{name} from {actor_text(plan.actors[registers[name].producer])}"
        for name in waiting.versions
    ]
    for name in waiting.copies:
        readers = ", ".join(actor_text(plan.actors[id]) for id in registers[name].consumers)
        needs.append(f"a free copy of {name}, read by {readers}")
    text = "; ".join(needs) or "its turn"
    actor = plan.actors[waiting.actor]
    return (
        f"{actor_text(actor)} waits in {when_text(actor, waiting.step, waiting.micro)} for {text}"
    )


def when_text(actor: Actor, step: int, micro: int) -> str:
    """The time of an act in words: "step 3", or "step 3, micro-batch 1" of an actor that acts for each."""
    return f"step {step}, micro-batch {micro}" if actor.acts > 1 else f"step {step}"
