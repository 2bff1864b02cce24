"""Gathers before the reductions of the block that runs meanwhile.

A communicator keeps its order, so a gather that is prefetched must also stand before these reductions:
they wait for that block's gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from weft.compiler.schedule.gathers.rings import AHEAD, gather_rings
from weft.ir.plan import Actor, Communicate, Compute, LocalProgram, Register
from weft.strategy.parts import Zero
from weft.strategy.sharding import ZeroRules


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

    Args:
        program: of the rank.
        actors: told by `prefetch`.
        controls: the registers between them.
        zero: which parameters are gathered for each use.
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

    That is before its first reader: what lets it begin is there by then, and so is what lets the
    gathers before it in its ring begin, whose readers come first.
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
    """An actor without some of its control registers."""
    if isinstance(actor, Compute):
        return replace(actor, produces=tuple(n for n in actor.produces if n not in controls))
    if isinstance(actor, Communicate):
        waits = tuple(name for name in actor.waits if name not in controls)
        signals = tuple(name for name in actor.signals if name not in controls)
        return replace(actor, waits=waits, signals=signals)
    return actor
