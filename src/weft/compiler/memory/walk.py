"""The memory that one rank holds when it holds most, by kind, read off its plan: no run is needed.

The acts of a step are walked in the order of time. A version of a register takes memory from the
act that makes it until its last reader is done; what an act takes for itself stands in
`act.py`. Views share the memory of what they look at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias, final

from weft.compiler.memory.act import act_memory, gradient_sources
from weft.compiler.memory.kinds import Taken
from weft.compiler.memory.order import Moment, acts_of, moments
from weft.ir.plan import Collective, Communicate, Fetch, RankPlan, Register
from weft.ir.queries.memory import KINDS, Kind, Memory, value_bytes
from weft.units import Bytes


@final
@dataclass(frozen=True, slots=True)
class Held:
    """A register, or a value of an act that runs, as it exists at the peak: name, versions, their bytes."""

    register: str
    versions: int
    bytes: Bytes


@final
@dataclass(frozen=True, slots=True)
class Peak:
    """The moment when a rank holds most.

    Attributes:
        rank: whose.
        memory: bytes by kind.
        held: what registers and running acts hold then, largest first, without variables and batch.
        actor: the actor that runs then; None when the rank holds nothing but variables.
    """

    rank: int
    memory: Memory
    held: tuple[Held, ...] = ()
    actor: int | None = None


def memory(plan: RankPlan, order: Iterable[Moment] | None = None) -> Peak:
    """The most that a rank holds in a step.

    Args:
        plan: what the rank runs.
        order: when its acts begin and end, in the order of time; by default the order of the plan.
    """
    walk = MemoryWalk(plan)
    for moment in moments(plan) if order is None else order:
        walk.take(moment)
    return walk.peak()


def levels(plan: RankPlan, order: Iterable[Moment]) -> Iterator[Bytes]:
    """The bytes that a rank holds after each moment of a step: `memory` is about the highest of them."""
    walk = MemoryWalk(plan)
    for moment in order:
        walk.take(moment)
        yield walk.total()


@final
@dataclass(slots=True, eq=False)
class Storage:
    """Memory that versions of registers stand on; compared by identity.

    Attributes:
        register: that it was made for.
        kind, bytes: what it is, and how much.
        users: how many versions of registers stand on it.
    """

    register: str
    kind: Kind
    bytes: Bytes
    users: int = 0


@final
@dataclass(frozen=True, slots=True)
class _Most:
    """The bytes held at a moment: in all, by kind, in registers; and those that each act that ran might free."""

    total: Bytes
    kinds: Counter[Kind]
    held: tuple[Storage, ...] = ()
    taken: Mapping[int, frozenset[Taken]] = field(default_factory=dict)
    actor: int | None = None


# A register's name and the number of a version.
_Version: TypeAlias = tuple[str, int]


@final
@dataclass
class MemoryWalk:
    """The memory of a rank, moment after moment: held now, and that held when it was most.

    Attributes:
        versions: the storage of every version that is there; None for views of what always is.
        readers: how many readers each of them still has.
        storages: those that some version stands on, by id.
        running: what the acts that run take.
        extras: what acts were found to take, by actor and what it may free.
        now: bytes by kind, without `running`.
        taken: what they may free on their way.
        most: the peak so far.
    """

    plan: RankPlan
    versions: dict[_Version, Storage | None] = field(default_factory=dict)
    readers: dict[_Version, int] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)
    running: dict[int, Counter[Kind]] = field(default_factory=dict)
    extras: dict[tuple[int, frozenset[Taken]], Counter[Kind]] = field(default_factory=dict)
    now: Counter[Kind] = field(default_factory=Counter)
    taken: dict[int, frozenset[Taken]] = field(default_factory=dict)
    most: _Most = field(default_factory=lambda: _Most(Bytes(-1), Counter()))

    def __post_init__(self) -> None:
        sources = gradient_sources(self.plan.actors)
        sources |= {
            each.input.name
            for actor in self.plan.actors
            if isinstance(actor, Communicate)
            for each in actor.collectives
            if isinstance(each, Collective) and each.output.name in sources and each.in_place
        }
        self.registers = {each.value.name: each for each in self.plan.registers}
        kinds = {name: KINDS[each.kind] for name, each in self.registers.items()}
        self.acts = [act_memory(actor, sources, kinds) for actor in self.plan.actors]
        for item in self.plan.inputs:
            self.now[KINDS[item.role]] += value_bytes(item.value)
        self._look(None)

    def take(self, moment: Moment) -> None:
        """An act begins or ends."""
        if moment.begins:
            self.begin(moment.actor, moment.micro)
        else:
            self.end(moment.actor, moment.micro)

    def reads(self, actor: int, micro: int) -> dict[str, Storage]:
        """The storages that an act that is to begin reads, by register, but for those that are there all the time."""
        found = {}
        for name in self.plan.actors[actor].consumes:
            storage = self.versions.get((name, self._version(actor, micro, self.registers[name])))
            if storage is not None:
                found[name] = storage
        return found

    def saved(self, actor: int) -> Bytes:
        """The bytes that an act that runs takes less, as it frees what it is the last to read on its way."""
        return Bytes(self.acts[actor].extra(frozenset()).total() - self.running[actor].total())

    def total(self) -> Bytes:
        """Bytes held now, without the host's."""
        running = sum(extra.total() for extra in self.running.values())
        return Bytes(self.now.total() + running - self.now["host"])

    def begin(self, actor: int, micro: int) -> None:
        """An act takes what it needs for itself."""
        if not micro:
            self._publish(actor, micro, kept=True)
        taken = self._taken(actor, micro)
        if (actor, taken) not in self.extras:
            self.extras[actor, taken] = self.acts[actor].extra(taken)
        self.running[actor] = self.extras[actor, taken]
        self.taken[actor] = taken
        self._look(actor)

    def end(self, actor: int, micro: int) -> None:
        """It leaves what it made, and gives back what it was the last to read."""
        del self.running[actor], self.taken[actor]
        self._publish(actor, micro, kept=False)
        one = self.plan.actors[actor]
        if isinstance(one, Fetch):
            return  # The caller gets what it read.
        for name in one.consumes:
            register = self.registers[name]
            key = (name, self._version(actor, micro, register))
            if key in self.versions and self._is_last(actor, micro, register):
                self._release(key)

    def _taken(self, actor: int, micro: int) -> frozenset[Taken]:
        """The storages that an act may free on its way, as only it still reads them."""
        names: dict[int, list[str]] = {}
        for name in self.plan.actors[actor].consumes:
            key = (name, self._version(actor, micro, self.registers[name]))
            storage = self.versions.get(key)
            alone = self.readers.get(key) == 1 and self._is_last(actor, micro, self.registers[name])
            if storage is not None and alone:
                names.setdefault(id(storage), []).append(name)
        return frozenset(
            Taken(frozenset(found), self.storages[id].kind, self.storages[id].bytes)
            for id, found in names.items()
            if self.storages[id].users == len(found)
        )

    def _publish(self, actor: int, micro: int, *, kept: bool) -> None:
        act = self.acts[actor]
        made: dict[str, Storage] = {}
        for name, base in act.bases.items():
            register = self.registers.get(name)
            if register is None or (base in act.kept) != kept:
                continue
            key = (name, self._version(actor, micro, register))
            if key in self.versions:
                continue
            if base in act.fresh and base not in made:
                kind, size = act.fresh[base]
                made[base] = Storage(base, kind, size)
            self._hold(key, made.get(base) or self._read(actor, micro, base), register)

    def _read(self, actor: int, micro: int, base: str) -> Storage | None:
        """The storage of what an act reads."""
        register = self.registers.get(base)
        if register is None:
            return None
        return self.versions.get((base, self._version(actor, micro, register)))

    def _hold(self, key: _Version, storage: Storage | None, register: Register) -> None:
        self.versions[key] = storage
        self.readers[key] = len(register.consumers)
        if storage is not None:
            if not storage.users:
                self.storages[id(storage)] = storage
                self.now[storage.kind] += storage.bytes
            storage.users += 1
        if not register.consumers:
            self.readers[key] = 1
            self._release(key)

    def _release(self, key: _Version) -> None:
        self.readers[key] -= 1
        if self.readers[key]:
            return
        storage = self.versions.pop(key)
        if storage is not None:
            storage.users -= 1
            if not storage.users:
                del self.storages[id(storage)]
                self.now[storage.kind] -= storage.bytes

    def _version(self, actor: int, micro: int, register: Register) -> int:
        return micro * register.rate // acts_of(self.plan.actors[actor])

    def _is_last(self, actor: int, micro: int, register: Register) -> bool:
        """True where an act is its actor's last that reads this version."""
        acts = acts_of(self.plan.actors[actor])
        return micro + 1 == acts or self._version(actor, micro + 1, register) != self._version(
            actor, micro, register
        )

    def _look(self, actor: int | None) -> None:
        """Remember the moment, if more is held than ever before."""
        total = self.total()
        if total > self.most.total:
            kinds = sum(self.running.values(), self.now.copy())
            held = tuple(self.storages.values())
            taken = dict(self.taken)
            self.most = _Most(total, kinds, held, taken, actor)

    def peak(self) -> Peak:
        """The memory that was held when it was most."""
        found: dict[str, list[Bytes]] = {}
        inside = (self.acts[actor].live(taken) for actor, taken in self.most.taken.items())
        held = ((each.register, each.bytes) for each in self.most.held)
        for name, size in chain(held, *(live.items() for live in inside)):
            found.setdefault(name, []).append(size)
        sizes = [Held(name, len(each), Bytes(sum(each))) for name, each in found.items()]
        sizes.sort(key=lambda each: (-each.bytes, each.register))
        return Peak(self.plan.rank, Memory.of(self.most.kinds), tuple(sizes), self.most.actor)
