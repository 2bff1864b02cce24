"""The order of a rank's actors: priorities of phases, and gathers before the reductions of another block.

Parameters that are gathered for each use (ZeRO 3) are prefetched: a few ahead, no more, by control registers. A gather
needs nothing but a shard that is always there, so it could run at any time, and what it makes would be there until it
is used. The gathers of a phase and a dtype form a ring, in the order of their use: the last reader of a gather lets the
one `AHEAD` places after it begin. In a loop the ring is closed: the last gathers of a micro-batch let the first of the
next one begin. A block trained in bfloat16 gathers its matrices, and its norms in float32: with one ring for both, two
of them ahead would be one block, and its gathers would wait for the block before to end.

A communicator keeps its order, so a gather that is prefetched must also be before the reductions that wait for the
gradients of the block that runs then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from weft.compiler.context import Context
from weft.compiler.schedule.bucket import parameter_values
from weft.compiler.schedule.draft import Bucket, PlanDraft
from weft.compiler.schedule.presets import with_priorities
from weft.ir.nodes import Phase
from weft.ir.plan import Actor, Communicate, Compute, Feed, LocalProgram, LocalValue, Register
from weft.strategy.parts import ZeroRules, highest_level, level_of, zero_rules

# How many gathers may be done or under way before the results of the first of them are used up.
AHEAD = 2


@final
@dataclass(frozen=True)
class ParameterGather:
    """A gather with the first and the last actor that reads what it makes.

    `passes` says whether micro-batches wait for one another between the two.
    """

    id: int
    first: int
    last: int
    passes: bool


def prioritise(draft: PlanDraft, _: Context) -> PlanDraft:
    """The draft with the priorities of its schedule; without one, actors act in the order of the graph."""
    if draft.rule is None:
        return draft
    return replace(draft, actors=with_priorities(draft.actors, draft.rule))


def prefetch(draft: PlanDraft, context: Context) -> PlanDraft:
    """The draft with control registers between gathers for each use (ZeRO 3)."""
    program, actors, zero = draft.program, draft.actors, context.options.zero
    if highest_level(zero) < 3:
        return draft
    controls = tuple(
        control
        for ring in gather_rings(program, actors, zero_rules(zero))
        for control in _controls(ring, program.micro_batches if actors[ring[0].id].acts > 1 else 1)
    )
    waits = {control.consumers[0]: control.value.name for control in controls}
    signals: dict[int, tuple[str, ...]] = {}
    for control in controls:
        signals[control.producer] = (*signals.get(control.producer, ()), control.value.name)
    told: list[Actor] = []
    for actor in actors:
        made = signals.get(actor.id, ())
        if isinstance(actor, Compute) and made:
            actor = replace(actor, produces=(*actor.produces, *made))
        elif isinstance(actor, Communicate) and (made or actor.id in waits):
            waited = (waits[actor.id],) if actor.id in waits else ()
            actor = replace(actor, waits=waited, signals=made)
        told.append(actor)
    return replace(draft, actors=tuple(told), controls=controls)


def _controls(ring: Sequence[ParameterGather], micro_batches: int) -> Iterator[Register]:
    """The registers that make each gather wait for the last reader of an earlier one."""
    for place, gather in enumerate(ring):
        behind = place + AHEAD
        again = behind >= len(ring)
        if again and (micro_batches == 1 or len(ring) <= AHEAD):
            continue
        target = ring[behind % len(ring)]
        # One that is read until late, such as a tied weight, holds nobody up.
        if not gather.passes and (again or gather.last < target.first):
            value, reader = LocalValue(f"turn.{target.id}", (0,), "bool"), (target.id,)
            credits, rate = micro_batches + 1, micro_batches
            yield Register(value, "control", gather.last, reader, credits, full=again, rate=rate)


def order_gathers(draft: PlanDraft, context: Context) -> PlanDraft:
    """The draft with renumbered actors, each gather right after the actor that lets it begin.

    In the new order, too, everything comes before what waits for it; a control register of which that does not hold is
    left out. For plans in the order of the graph; others find the orders of communicators by a simulation.
    """
    if draft.rule is not None or not draft.controls:
        return draft
    places = _places(draft, zero_rules(context.options.zero))
    ordered = sorted(draft.actors, key=lambda each: (places.get(each.id, each.id), each.id))
    number = {actor.id: place for place, actor in enumerate(ordered)}
    kept, left_out = list[Register](), set[str]()
    for each in draft.controls:
        producer, (reader,) = number[each.producer], each.consumers
        if producer < number[reader]:
            kept.append(replace(each, producer=producer, consumers=(number[reader],)))
        else:
            left_out.add(each.value.name)

    def told(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in left_out)

    actors: list[Actor] = []
    for place, actor in enumerate(ordered):
        actor = replace(actor, id=place)
        if isinstance(actor, Compute):
            actor = replace(actor, produces=told(actor.produces))
        elif isinstance(actor, Communicate):
            actor = replace(actor, waits=told(actor.waits), signals=told(actor.signals))
        actors.append(actor)
    return replace(draft, actors=tuple(actors), controls=tuple(kept))


def _places(draft: PlanDraft, rules: ZeroRules) -> dict[int, float]:
    """For each gather, the actor that it comes after; gathers of a ring keep their order.

    This point is before its first reader: its operands are there by then, as are those of earlier gathers in its
    ring, whose readers come first.
    """
    actors = draft.actors
    makers = {name: actor.id for actor in actors for name in actor.produces}
    begins = {control.consumers[0]: control.producer for control in draft.controls}
    found: dict[int, float] = {}
    for ring in gather_rings(draft.program, actors, rules):
        last = 0.5
        for turn, gather in enumerate(ring):
            # Updates make parameters again, later.
            made = (makers.get(name, gather.id) for name in actors[gather.id].consumes)
            before = [id for id in made if id < gather.id]
            if gather.id in begins:
                before.append(begins[gather.id])
            elif turn >= AHEAD:
                before.append(gather.id)
            last = max(last, *(found.get(id, id) + 0.5 for id in before), 0.5)
            found[gather.id] = last
    return found


def gather_rings(
    program: LocalProgram, actors: Sequence[Actor], rules: ZeroRules
) -> Iterator[list[ParameterGather]]:
    """The gathers of parameters that run as often as the step needs them, in the order of their use.

    By phase, communicator and dtype; and where all micro-batches wait for one another, those before and those behind.
    Only ZeRO 3 gathers for each use; whatever else is gathered stays for the step.
    """
    shards = parameter_values(program)
    again = parameter_values(program, lambda key: level_of(rules, key) == 3)
    readers: dict[str, list[int]] = {}
    for actor in actors:
        for name in actor.consumes:
            readers.setdefault(name, []).append(actor.id)
    rounds = _rounds(program, actors)
    rings: dict[tuple[Phase, int, str, str], list[ParameterGather]] = {}
    for actor in actors:
        if not isinstance(actor, Communicate) or actor.acts != program.micro_batches:
            continue
        bucket = Bucket(actor.collectives)
        made = [n.name for each in bucket.collectives if again & each.reads for n in each.makes]
        ids = [id for name in made for id in readers.get(name, ())]
        if ids and bucket.gathers and bucket.reads <= shards:
            first, last = min(ids), max(ids)
            gather = ParameterGather(actor.id, first, last, rounds[first] != rounds[last])
            key = (actor.phase, rounds[first], actor.queue, bucket.makes[0].dtype)
            rings.setdefault(key, []).append(gather)
    for ring in rings.values():
        yield sorted(ring, key=lambda gather: (gather.first, gather.id))


def _rounds(program: LocalProgram, actors: Sequence[Actor]) -> list[int]:
    """For each actor, how often micro-batches have waited for one another before its acts are wanted.

    They do for what is read once a step, and for what is complete after the last of them alone. None have for the
    batch, and for what another stage sends. A value made of parameters alone belongs to its first reader.
    """

    def waits(maker: int, name: str, reader: Actor) -> bool:
        return actors[maker].acts > 1 and (reader.acts == 1 or name not in program.loop)

    makers = {name: actor.id for actor in actors for name in actor.produces}
    found: list[int | None] = []
    readers: list[list[int]] = [[] for _ in actors]
    for actor in actors:
        made = [(makers.get(name, actor.id), name) for name in actor.consumes]
        before = [(id, name) for id, name in made if id < actor.id]
        rounds = [
            round + waits(id, name, actor)
            for id, name in before
            if (round := found[id]) is not None
        ]
        # The batch comes, and what another stage sends in each micro-batch.
        sent = isinstance(actor, Communicate) and actor.acts > 1 and not actor.consumes
        found.append(max(rounds, default=0 if sent or isinstance(actor, Feed) else None))
        for id, _ in before:
            readers[id].append(actor.id)
    for actor in reversed(actors):
        if found[actor.id] is None:
            known = (found[id] for id in readers[actor.id])
            found[actor.id] = min((round for round in known if round is not None), default=0)
    return [round or 0 for round in found]
