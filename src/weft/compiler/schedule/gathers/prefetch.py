"""Prefetch parameters that are gathered for each use: a few ahead, no more, by control registers.

A gather needs nothing but a shard that is always there, so it could run at any time, and what it
makes would lie there until it is used. Here the gathers of a phase form a ring, in the order of
their use: the last reader of a gather lets the one `AHEAD` places after it begin. In a loop the
ring is closed: the last gathers of a micro-batch let the first of the next one begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from weft.compiler.schedule.gathers.rings import AHEAD, ParameterGather, gather_rings
from weft.ir.plan import Actor, Communicate, Compute, LocalProgram, LocalValue, Register
from weft.strategy.parts import Zero
from weft.strategy.sharding import ZeroRules, highest_level


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
    """An actor with the control registers that it waits for and gives."""
    made = signals.get(actor.id, ())
    if isinstance(actor, Compute) and made:
        return replace(actor, produces=(*actor.produces, *made))
    if isinstance(actor, Communicate) and (made or actor.id in waits):
        waited = (waits[actor.id],) if actor.id in waits else ()
        return replace(actor, waits=waited, signals=made)
    return actor
