"""Gathers before the reductions of the block that runs meanwhile.

A communicator keeps its order, so a gather that is prefetched must also stand before these reductions:
they wait for that block's gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from weft.compiler.schedule.bucket import Bucket, parameter_values
from weft.ir.nodes import Phase
from weft.ir.plan import Actor, Communicate, Compute, Feed, LocalProgram, LocalValue, Register
from weft.strategy.parts import Zero, ZeroRules, highest_level, level_of, zero_rules


def gathers_first(
    program: LocalProgram,
    actors: tuple[Actor, ...],
    controls: tuple[Register, ...],
    zero: Zero | ZeroRules | None,
) -> tuple[tuple[Actor, ...], tuple[Register, ...]]:
    """The actors, renumbered, with each gather right behind what lets it begin.

    Nothing hangs by it: in the new order, too, everything comes before what waits for it; a control
    register of which that does not hold is left out. For plans in the order of the graph; others
    find the orders of communicators by a simulation.
    """
    if not controls:
        return actors, controls
    places = _places(program, actors, controls, zero)
    ordered = sorted(actors, key=lambda actor: (places.get(actor.id, actor.id), actor.id))
    number = {actor.id: place for place, actor in enumerate(ordered)}
    moved = tuple(
        replace(
            each,
            producer=number[each.producer],
            consumers=tuple(number[id] for id in each.consumers),
        )
        for each in controls
    )
    kept = tuple(each for each in moved if each.producer < each.consumers[0])
    left_out = {each.value.name for each in moved} - {each.value.name for each in kept}
    renumbered = (replace(actor, id=number[actor.id]) for actor in ordered)
    return tuple(_untold(actor, left_out) for actor in renumbered), kept


def _places(
    program: LocalProgram,
    actors: Sequence[Actor],
    controls: Sequence[Register],
    zero: Zero | ZeroRules | None,
) -> dict[int, float]:
    """For each gather, behind which actor it stands; gathers of a ring keep their order.

    This point is before its first reader: its operands are there by then, as are those of earlier gathers in its
    ring, whose readers come first.
    """
    makers = {name: actor.id for actor in actors for name in actor.produces}
    begins = {control.consumers[0]: control.producer for control in controls}
    found: dict[int, float] = {}
    for ring in gather_rings(program, actors, zero):
        last = 0.5
        for turn, gather in enumerate(ring):
            # Updates make parameters anew, later.
            made = (makers.get(name, gather.id) for name in actors[gather.id].consumes)
            before = [id for id in made if id < gather.id]
            if gather.id in begins:
                before.append(begins[gather.id])
            elif turn >= AHEAD:
                before.append(gather.id)
            last = max(last, *(found.get(id, id) + 0.5 for id in before), 0.5)
            found[gather.id] = last
    return found


def _untold(actor: Actor, controls: Collection[str]) -> Actor:
    if isinstance(actor, Compute):
        return replace(actor, produces=tuple(n for n in actor.produces if n not in controls))
    if isinstance(actor, Communicate):
        waits = tuple(name for name in actor.waits if name not in controls)
        signals = tuple(name for name in actor.signals if name not in controls)
        return replace(actor, waits=waits, signals=signals)
    return actor


# Prefetch parameters that are gathered for each use: a few ahead, no more, by control registers.
#
# A gather needs nothing but a shard that is always there, so it could run at any time, and what it
# makes would lie there until it is used. Here the gathers of a phase form a ring, in the order of
# their use: the last reader of a gather lets the one `AHEAD` places after it begin. In a loop the
# ring is closed: the last gathers of a micro-batch let the first of the next one begin.


def prefetch(
    program: LocalProgram, actors: tuple[Actor, ...], zero: Zero | ZeroRules | None
) -> tuple[tuple[Actor, ...], tuple[Register, ...]]:
    """The actors of a rank with control registers between gathers for each use (ZeRO 3), and those registers."""
    if highest_level(zero) < 3:
        return actors, ()
    controls = tuple(
        control
        for ring in gather_rings(program, actors, zero)
        for control in _controls(ring, program.micro_batches if actors[ring[0].id].acts > 1 else 1)
    )
    waits = {control.consumers[0]: control.value.name for control in controls}
    signals: dict[int, tuple[str, ...]] = {}
    for control in controls:
        name = control.value.name
        signals[control.producer] = (*signals.get(control.producer, ()), name)
    return tuple(_told(actor, waits, signals) for actor in actors), controls


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
            value = LocalValue(f"turn.{target.id}", (0,), "bool")
            yield Register(
                value,
                "control",
                gather.last,
                (target.id,),
                credits=micro_batches + 1,
                full=again,
                rate=micro_batches,
            )


def _told(actor: Actor, waits: Mapping[int, str], signals: Mapping[int, tuple[str, ...]]) -> Actor:
    made = signals.get(actor.id, ())
    if isinstance(actor, Compute) and made:
        return replace(actor, produces=(*actor.produces, *made))
    if isinstance(actor, Communicate) and (made or actor.id in waits):
        waited = (waits[actor.id],) if actor.id in waits else ()
        return replace(actor, waits=waited, signals=made)
    return actor


# Rings of gathers: those of a phase and a dtype, in the order of their use, of which a few run ahead.
#
# A block trained in bfloat16 gathers its matrices, and its norms in float32: with one ring for both, two of them
# ahead would be one block, and its gathers would wait for the block before to end.


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


def gather_rings(
    program: LocalProgram, actors: Sequence[Actor], zero: Zero | ZeroRules | None
) -> Iterator[list[ParameterGather]]:
    """The gathers of parameters that run as often as the step needs them, in the order of their use.

    By phase, communicator and dtype; and where all micro-batches wait for one another, those before and those behind.
    Only ZeRO 3 gathers for each use; whatever else is gathered stays for the step.
    """
    rules = zero_rules(zero)
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
        found.append(max(rounds, default=0 if _comes(actor) else None))
        for id, _ in before:
            readers[id].append(actor.id)
    for actor in reversed(actors):
        if found[actor.id] is None:
            known = (found[id] for id in readers[actor.id])
            found[actor.id] = min((round for round in known if round is not None), default=0)
    return [round or 0 for round in found]


def _comes(actor: Actor) -> bool:
    """True for the batch, and for what another stage sends in each micro-batch."""
    received = isinstance(actor, Communicate) and actor.acts > 1 and not actor.consumes
    return isinstance(actor, Feed) or received
