"""What an all-reduce may write its result over: its input, where nobody else holds that memory.

Gradients are reduced where they lie, then: no bucket is filled and emptied, and no memory is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weft.compiler.local.aliases import VIEW_OPS
from weft.ir.logical import OVER_STEP, refs
from weft.ir.plan import (
    Actor,
    Collective,
    Communicate,
    Compute,
    LocalCall,
    LocalUpdate,
    RankPlan,
)

# Of a single micro-batch these hand on what they get.
_HANDS_ON = VIEW_OPS | OVER_STEP


def overwritten(plan: RankPlan) -> frozenset[str]:
    """The registers that the one all-reduce that reads them writes over."""
    registers = {register.value.name: register for register in plan.registers}
    given = {item.value.name for item in plan.inputs}
    found: set[str] = set()
    own: dict[int, frozenset[str]] = {}
    for actor in plan.actors:
        for name in _reduced(actor):
            register = registers[name]
            maker = plan.actors[register.producer]
            # Each version is read by one act of this actor, and by nobody else.
            read_once = register.consumers == (actor.id,) and register.rate == _acts(actor)
            if read_once and name not in given:
                if maker.id not in own:
                    own[maker.id] = _own_memory(maker)
                found |= own[maker.id] & {name}
    return frozenset(found)


def _acts(actor: Actor) -> int:
    return actor.acts if isinstance(actor, Communicate | Compute) else 1


def _reduced(actor: Actor) -> Iterator[str]:
    """The inputs of all-reduces that are read once."""
    if isinstance(actor, Communicate):
        each = [one for one in actor.collectives if isinstance(one, Collective)]
        times = Counter(one.input.name for one in each)
        for one in each:
            if one.kind == "all_reduce" and times[one.input.name] == 1:
                yield one.input.name


def _own_memory(maker: Actor) -> frozenset[str]:
    """What an actor gives away whose memory it has made, and shares with nothing else that it gives away."""
    if isinstance(maker, Communicate):
        return frozenset(maker.produces)
    if not isinstance(maker, Compute):
        return frozenset()
    bases: dict[str, str] = {}
    for node in maker.nodes:
        if isinstance(node, LocalCall):
            views = node.op in _HANDS_ON and (node.op not in OVER_STEP or maker.acts == 1)
            first = next(refs(node.args), None) if views else None
            base = None if first is None else bases.get(first, "")
            bases.update((value.name, value.name if base is None else base) for value in node.makes)
    sources = (node.source for node in maker.nodes if isinstance(node, LocalUpdate))
    leaving = {*maker.produces, *sources} & bases.keys()
    users = Counter(bases[name] for name in leaving)
    # "" stands for memory that was there before.
    return frozenset(name for name in leaving if bases[name] and users[bases[name]] == 1)
