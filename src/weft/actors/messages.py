"""The messages of a queue's state machine: events go in, actions and acts come out.

Named tuples, because a step makes one of them for every edge of the plan and they cost a third of a frozen dataclass.
Versions of a register are numbered from 0, `rate` versions per step. An actor that acts once a step reads version `s`
in step `s`; one that acts for each of `M` micro-batches reads version `s * M + m` of a register of rate `M`, and
version `s` of one of rate 1 in all acts of step `s`. Its results are numbered likewise, plus one in a register that was
full before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

from weft.ir.plan import Actor, Communicate, Compute, RankPlan


@final
class Begin(NamedTuple):
    """Event: every actor may now act for step `step`; steps begin in order."""

    step: int


@final
class Ready(NamedTuple):
    """Event (`req`): version `version` of `register`, produced on another queue, may be read."""

    register: str
    version: int


@final
class Released(NamedTuple):
    """Event (`ack`): another queue has no reader left for version `version` of `register`."""

    register: str
    version: int


@final
class Finished(NamedTuple):
    """Event: the act that was started has been done."""

    actor: int
    step: int
    micro: int = 0


@final
class Act(NamedTuple):
    """A start by a machine: run actor `actor` for micro-batch `micro` of step `step`, then report `Finished`."""

    actor: int
    step: int
    micro: int = 0


@final
class Send(NamedTuple):
    """Action: hand `event` to the machine of `queue`."""

    queue: str
    event: Ready | Released


@final
class Free(NamedTuple):
    """Action: drop version `version` of `register`, made on this queue: no actor of this queue reads it.

    For other versions, the last reader takes the queue's reference along.
    """

    register: str
    version: int


@final
class EndStep(NamedTuple):
    """Action: every actor of this queue has acted for step `step`."""

    step: int


Event: TypeAlias = Begin | Ready | Released | Finished
Action: TypeAlias = Send | Free | EndStep


@final
@dataclass(frozen=True, slots=True)
class IssueSlot:
    """An act of a step, and what it waits for.

    Attributes:
        actor, micro: the act.
        place: position of its end in an order of all ends.
        waits: the number of ends in that order that come before it begins.
    """

    actor: int
    micro: int
    place: int
    waits: int


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
