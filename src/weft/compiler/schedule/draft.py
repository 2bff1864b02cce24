"""The plan of one rank while passes make it: nodes in order, then actors, then registers.

A `PlanPass` is one public function of a `PlanDraft` and the `Context`; the table `PLAN` in `pipeline.py` says in which
order they run. A draft is verified after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

from weft.cached import cached_property
from weft.compiler.context import Context
from weft.compiler.schedule.presets import Preset
from weft.errors import InternalError
from weft.ir.legal.plans import verify_communicators, verify_plan
from weft.ir.nodes import Phase
from weft.ir.plan import (
    Actor,
    Communicate,
    Communicator,
    Compute,
    Exchange,
    LocalCall,
    LocalNode,
    LocalProgram,
    LocalUpdate,
    LocalValue,
    RankPlan,
    Register,
)


@final
@dataclass(frozen=True)
class Bucket:
    """Collectives that run as one, or a transfer."""

    collectives: tuple[Exchange, ...]

    @cached_property
    def reads(self) -> frozenset[str]:
        """The local values that go in."""
        return frozenset(name for collective in self.collectives for name in collective.reads)

    @cached_property
    def makes(self) -> tuple[LocalValue, ...]:
        """The local values that come out."""
        return tuple(value for collective in self.collectives for value in collective.makes)

    @property
    def gathers(self) -> bool:
        """True if it makes tensors whole."""
        return all(each.kind == "all_gather" for each in self.collectives)

    @property
    def phase(self) -> Phase:
        """The phase, the same for all collectives."""
        return self.collectives[0].phase


ScheduleItem: TypeAlias = LocalCall | LocalUpdate | Bucket
Schedule: TypeAlias = tuple[ScheduleItem, ...]


@final
@dataclass(frozen=True)
class PlanDraft:
    """The plan of one rank under construction.

    Attributes:
        communicators: of all ranks.
        rule: the schedule that orders phases; None for the order of the graph.
        schedule: the nodes of the program in order, small collectives in buckets.
        actors: what runs the nodes, numbered in order.
        controls: registers that only make actors wait.
        plan: the actors with all registers.
    """

    program: LocalProgram
    communicators: tuple[Communicator, ...] = ()
    rule: Preset | None = None
    schedule: Schedule = ()
    actors: tuple[Actor, ...] = ()
    controls: tuple[Register, ...] = ()
    plan: RankPlan | None = None


PlanPass: TypeAlias = Callable[[PlanDraft, Context], PlanDraft]


def run_on_draft(rows: Iterable[PlanPass], draft: PlanDraft, context: Context) -> PlanDraft:
    """The draft after all passes, verified after each.

    Raises:
        InternalError: when a pass makes a draft that is not legal; the message names the pass and what is wrong.
    """
    for row in rows:
        draft = row(draft, context)
        problem = _problem(draft)
        if problem is not None:
            raise InternalError(f"{row.__name__} of rank {draft.program.rank}: {problem}")
        if draft.plan is not None:
            verify_communicators(verify_plan(draft.plan), draft.communicators)
    return draft


def _problem(draft: PlanDraft) -> str | None:
    """The first rule that a draft breaks: each node runs once, and each value that is read is made by an actor."""
    nodes: list[LocalNode] = []
    for item in () if draft.actors else draft.schedule:
        nodes += item.collectives if isinstance(item, Bucket) else (item,)
    for actor in draft.actors:
        if isinstance(actor, Communicate):
            nodes += actor.collectives
        elif isinstance(actor, Compute):
            nodes += actor.nodes
    wanted = draft.program.nodes
    made, asked = (
        {value.name for node in each for value in node.makes} for each in (nodes, wanted)
    )
    if len(nodes) != len(wanted) or made != asked:
        return (
            f"{len(nodes)} nodes run, of {len(wanted)} of the program, each of which must run once"
        )
    for place, actor in enumerate(draft.actors):
        if actor.id != place:
            return f"actor {actor.id} is at place {place}"
    made = {name for actor in draft.actors for name in actor.produces}
    read = {name for actor in draft.actors for name in actor.consumes}
    missing = sorted(read - made)
    return f"no actor makes {', '.join(missing)}" if missing else None
