"""The memory that one act takes beside its inputs: temporaries that are freed after their last use, and its results.

The walk follows `runtime/kernels/generated.py` and `runtime/executor/optimizer.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from weft.cached import cached_property
from weft.compiler.memory.exchange import communicate
from weft.compiler.memory.kinds import ActMemory, Taken
from weft.ir.logical import OVER_STEP
from weft.ir.plan import (
    Actor,
    Communicate,
    Compute,
    LocalCall,
    LocalUpdate,
)
from weft.ir.queries.alias import view_bases
from weft.ir.queries.memory import Kind, value_bytes
from weft.ops.weft_ops import ELEMENTS_AT_A_TIME, WEFT_OPS
from weft.units import ITEM_SIZE, NO_BYTES, Bytes

KindOf: TypeAlias = Callable[[str], Kind]


def gradient_sources(actors: Iterable[Actor]) -> frozenset[str]:
    """The names of what optimizers read."""
    return frozenset(
        node.source
        for actor in actors
        if isinstance(actor, Compute)
        for node in actor.nodes
        if isinstance(node, LocalUpdate) and node.rule != "copy"
    )


def act_memory(
    actor: Actor,
    sources: Collection[str],
    registers: Mapping[str, Kind],
) -> ActMemory:
    """The memory that an act of `actor` takes.

    Args:
        actor: any; those of the host take nothing.
        sources: names of what optimizers read.
        registers: the kind of every register.
    """
    match actor:
        case Compute():
            return _compute(actor, sources, registers)
        case Communicate():
            return communicate(actor, sources)
        case _:
            return ActMemory()


def _compute(actor: Compute, sources: Collection[str], registers: Mapping[str, Kind]) -> ActMemory:
    calls = [node for node in actor.nodes if isinstance(node, LocalCall)]
    updates = [node for node in actor.nodes if isinstance(node, LocalUpdate)]
    bases = view_bases(call for call in calls if not _is_blank(call))
    made = {value.name: value for call in calls for value in call.makes}
    kept = {v.name for call in calls if call.op in OVER_STEP for v in call.makes}
    marked = {bases.get(name, name) for name in made if name in sources}
    away = {value.name for call in calls if call.op == "weft.offload" for value in call.makes}

    def kind(name: str) -> Kind:
        if name in marked or name in away:
            return "gradients" if name in marked else "host"
        return registers.get(name, "activations")

    produced = {name: bases.get(name, name) for name in actor.produces if name in made}
    read = {bases.get(update.source, update.source) for update in updates}
    lasting = {*produced.values(), *read}
    walk = _Segment(calls, bases, frozenset(lasting), frozenset(kept), kind)
    fresh = {
        base: (kind(base), value_bytes(made[base])) for base in produced.values() if base in made
    }
    return ActMemory(walk.most, walk.live, fresh, produced, frozenset(kept))


def _is_blank(call: LocalCall) -> bool:
    """True where a rank that does not keep a value makes a neutral one in its place."""
    return call.op == "weft.keep" and call.args[1] is False


def _rows(call: LocalCall) -> Bytes:
    """The bytes of the rows of its result that a call makes besides, a few at a time."""
    known = WEFT_OPS.get(call.op)
    if known is None or not known.rows:
        return NO_BYTES
    (made,) = call.makes
    rows, width = made.shape
    some = min(rows, max(1, ELEMENTS_AT_A_TIME // max(1, width)))
    return Bytes(some * width * ITEM_SIZE[made.dtype])


@final
@dataclass(frozen=True)
class _Segment:
    """A run of calls.

    Attributes:
        calls: in their order.
        bases: for each view, the value whose memory it shares.
        lasting: what stays until the end: results, and what updates read.
        kept: what was there before; it does not count.
        kind: of every value.
    """

    calls: Sequence[LocalCall]
    bases: Mapping[str, str]
    lasting: frozenset[str]
    kept: frozenset[str]
    kind: KindOf

    @cached_property
    def last(self) -> dict[str, int]:
        """For every value that is no view, the place of the last call that uses its memory."""
        return {
            self.bases.get(name, name): place
            for place, call in enumerate(self.calls)
            for name in (*call.reads, *(value.name for value in call.makes))
        }

    def most(self, taken: Collection[Taken]) -> Counter[Kind]:
        """The most that the calls take at a time; values are freed after their last use."""
        return self._highest(taken)[0]

    def live(self, taken: Collection[Taken]) -> dict[str, Bytes]:
        """The values, with their bytes, that calls have made and that are there when they take most."""
        highest = self._highest(taken)[1]
        return {
            value.name: value_bytes(value)
            for call in self.calls[: highest + 1]
            for value in call.makes
            if value.name not in self.bases
            and (value.name in self.lasting or self.last[value.name] >= highest)
        }

    def _highest(self, taken: Collection[Taken]) -> tuple[Counter[Kind], int]:
        """The memory that is taken when it is most, and the place of the call that runs then."""
        ending: dict[int, list[tuple[Kind, Bytes]]] = {}
        for each in taken:
            if self.lasting.isdisjoint(each.names):
                place = max((self.last.get(name, 0) for name in each.names), default=0)
                ending.setdefault(place, []).append((each.kind, each.bytes))
        now, most, total, highest, where = Counter[Kind](), Counter[Kind](), 0, 0, -1
        for place, call in enumerate(self.calls):
            for value in call.makes:
                kind, size = self.kind(value.name), value_bytes(value)
                if value.name in self.bases or value.name in self.kept or kind == "host":
                    continue
                now[kind] += size
                total += size
                if value.name not in self.lasting:
                    ending.setdefault(self.last[value.name], []).append((kind, size))
            rows = _rows(call)
            if total + rows > highest:
                most, highest, where = now.copy(), total + rows, place
                most["activations"] += rows
            for kind, size in ending.get(place, ()):
                now[kind] -= size
                total -= size
        return most, where
