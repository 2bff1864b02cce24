"""Rings of gathers: those of a phase and a dtype, in the order of their use, of which a few run ahead.

A block that is trained in bfloat16 gathers its matrices, and its norms in float32: with one ring for both, two of them
ahead would be one block, and its gathers would wait for the block before to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from weft.compiler.schedule.bucket import Bucket, parameter_values
from weft.ir.nodes import Phase
from weft.ir.plan import Actor, Communicate, Feed, LocalProgram
from weft.strategy.parts import Zero
from weft.strategy.sharding import ZeroRules, level_of, zero_rules

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
    batch, and for what another stage sends. What is made of parameters alone belongs to its first reader.
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
