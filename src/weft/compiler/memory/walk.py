"""The peak memory of one rank by kind, computed from its plan without a run.

The acts of a step are walked in the order of time. A version of a register takes memory from the act that makes it
until its last reader is done; what an act takes for itself is in `act.py`. Views share the memory of their base.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, final

from weft.compiler.memory.act import OwnedStorage, act_memory, gradient_sources
from weft.compiler.memory.order import (
    ActVersions,
    Base,
    FilledRegister,
    Moment,
    moments,
    versions_of,
)
from weft.compiler.memory.strides import out_of_order
from weft.ir.alias import KINDS, Kind, Memory
from weft.ir.plan import Collective, Communicate, RankPlan
from weft.units import NO_BYTES, Bytes


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
    """The moment when a rank holds the most memory.

    Attributes:
        memory: bytes by kind.
        held: what registers and running acts hold then, largest first, without variables and batch.
        actor: the actor that runs then; None when the rank holds nothing but variables.
        of_micro_batch, of_step: the most bytes held as an act begins of which a step has several, one for each
            micro-batch, or one; the larger is the peak. Without micro-batches the first is 0.
    """

    rank: int
    memory: Memory
    held: tuple[Held, ...] = ()
    actor: int | None = None
    of_micro_batch: Bytes = NO_BYTES
    of_step: Bytes = NO_BYTES


def memory(plan: RankPlan, order: Iterable[Moment] | None = None) -> Peak:
    """The most that a rank holds in a step.

    Args:
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
class VersionStorage:
    """The memory of versions of registers; compared by identity.

    Attributes:
        register: that it was made for.
        users: how many versions of registers are on it.
    """

    register: str
    kind: Kind
    bytes: Bytes
    users: int = 0


@final
@dataclass(slots=True, eq=False)
class _Version:
    """A version of a register that is there: its storage, None for a view of what always is; and readers left.

    `under` is a storage that it may look at besides.
    """

    storage: VersionStorage | None
    readers: int
    under: VersionStorage | None = None


@final
class _Extra(NamedTuple):
    """The bytes that an act takes for itself, by kind and in all, and what it may free on its way."""

    kinds: Counter[Kind]
    total: int
    taken: frozenset[OwnedStorage]


@final
class _Most(NamedTuple):
    """The bytes held at a moment, in all; what the acts that ran took; and the actor that began then."""

    total: int
    running: Mapping[int, _Extra]
    actor: int | None


@final
@dataclass
class MemoryWalk:
    """The memory of a rank, moment after moment: held now, and at the peak.

    Attributes:
        storages: those that some version is on.
        running: what the acts that run take.
        extras: what acts were found to take, by actor and what it may free.
        held: bytes of `now`, without the host's.
        extra: bytes of `running`.
        most: the peak so far.
        of_micro_batch, of_step: bytes of the peaks so far of acts of a micro-batch, and of a step.
        since: storages that came or went since the peak, in order.
    """

    plan: RankPlan
    versions: dict[tuple[str, int], _Version] = field(default_factory=dict)
    storages: set[VersionStorage] = field(default_factory=set)
    running: dict[int, _Extra] = field(default_factory=dict)
    extras: dict[tuple[object, ...], _Extra] = field(default_factory=dict)
    now: Counter[Kind] = field(default_factory=Counter)
    held: int = 0
    extra: int = 0
    most: _Most = field(default_factory=lambda: _Most(-1, {}, None))
    of_micro_batch: int = 0
    of_step: int = 0
    since: list[VersionStorage] = field(default_factory=list)

    def __post_init__(self) -> None:
        sources = gradient_sources(self.plan.actors)
        sources |= {
            each.input.name
            for actor in self.plan.actors
            if isinstance(actor, Communicate)
            for each in actor.collectives
            if isinstance(each, Collective) and each.output.name in sources and each.in_place
        }
        given = (sources, self.plan.register_of, out_of_order(self.plan))
        self.acts = [act_memory(actor, *given) for actor in self.plan.actors]
        self.touched = versions_of(self.plan, self.acts)
        for item in self.plan.inputs:
            self._add(KINDS[item.role], item.value.nbytes)
        self._note_peak(None)

    def take(self, moment: Moment) -> None:
        """An act begins or ends."""
        if moment.begins:
            self.begin(moment.actor, moment.micro)
        else:
            self.end(moment.actor, moment.micro)

    def reads(self, actor: int, micro: int) -> dict[str, VersionStorage]:
        """The storages that an act that is to begin reads, by register, but for those that are there all the time."""
        touched, found = self.touched[actor], dict[str, VersionStorage]()
        for name, rate in touched.reads:
            version = self.versions.get((name, micro * rate // touched.acts))
            if version is not None and version.storage is not None:
                found[name] = version.storage
        return found

    def saved(self, actor: int) -> Bytes:
        """The bytes that an act that runs takes less, as it frees what it is the last to read on its way."""
        return Bytes(self.acts[actor].extra(frozenset()).total() - self.running[actor].total)

    def total(self) -> Bytes:
        """Bytes held now, without the host's."""
        return Bytes(self.held + self.extra)

    def begin(self, actor: int, micro: int) -> None:
        """An act takes what it needs for itself."""
        touched = self.touched[actor]
        if not micro and touched.kept:
            self._publish(touched, touched.kept, micro)
        extra = self._extra(actor, touched, micro)
        self.running[actor] = extra
        self.extra += extra.total
        self._note_peak(actor)

    def end(self, actor: int, micro: int) -> None:
        """End an act: its results stay, and values that it read last are freed."""
        self.extra -= self.running.pop(actor).total
        touched, versions = self.touched[actor], self.versions
        if touched.left:
            self._publish(touched, touched.left, micro)
        if touched.gives:
            return  # The caller gets what it read.
        acts = touched.acts
        for name, rate in touched.reads:
            number = micro * rate // acts
            # For a version that several acts read, the last gives it back.
            if (micro + 1) * rate // acts != number or micro + 1 == acts:
                version = versions.get((name, number))
                if version is not None:
                    self._release(name, number, version)

    def _extra(self, actor: int, touched: ActVersions, micro: int) -> _Extra:
        """The bytes that an act takes, which may free the storages on its way that only it still reads."""
        names, acts, versions = dict[VersionStorage, list[str]](), touched.acts, self.versions
        for name, rate in touched.reads:
            number = micro * rate // acts
            version = versions.get((name, number))
            if version is None or version.readers != 1 or version.storage is None:
                continue
            if (micro + 1) * rate // acts != number or micro + 1 == acts:
                names.setdefault(version.storage, []).append(name)
        free = [
            (tuple(found), each.kind, each.bytes)
            for each, found in names.items()
            if each.users == len(found)
        ]
        key = (actor, *free)
        known = self.extras.get(key)
        if known is None:
            taken = frozenset(
                [OwnedStorage(frozenset(found), kind, size) for found, kind, size in free]
            )
            kinds = self.acts[actor].extra(taken)
            known = self.extras[key] = _Extra(kinds, kinds.total(), taken)
        return known

    def _publish(self, touched: ActVersions, left: Iterable[FilledRegister], micro: int) -> None:
        acts, versions = touched.acts, self.versions
        made: dict[str, VersionStorage] = {}

        def storage_of(base: Base) -> VersionStorage | None:
            storage = made.get(base.name)
            if storage is None and base.fresh is not None:
                storage = made[base.name] = VersionStorage(base.name, *base.fresh)
            elif storage is None and base.rate:
                below = versions.get((base.name, micro * base.rate // acts))
                storage = None if below is None else below.storage
            return storage

        for name, rate, readers, on, under in left:
            number = micro * rate // acts
            if (name, number) not in versions:
                below = under and storage_of(under)
                version = _Version(storage_of(on), readers or 1, below)
                versions[name, number] = version
                for storage in (version.storage, version.under):
                    if storage is not None:
                        if not storage.users:
                            self.storages.add(storage)
                            self.since.append(storage)
                            self._add(storage.kind, storage.bytes)
                        storage.users += 1
                if not readers:
                    self._release(name, number, version)

    def _release(self, name: str, number: int, version: _Version) -> None:
        version.readers -= 1
        if version.readers:
            return
        del self.versions[name, number]
        for storage in (version.storage, version.under):
            if storage is not None:
                storage.users -= 1
                if not storage.users:
                    self.storages.remove(storage)
                    self.since.append(storage)
                    self._add(storage.kind, -storage.bytes)

    def _add(self, kind: Kind, size: int) -> None:
        self.now[kind] += size
        if kind != "host":
            self.held += size

    def _note_peak(self, actor: int | None) -> None:
        total = self.held + self.extra
        if actor is not None and self.touched[actor].acts > 1:
            self.of_micro_batch = max(self.of_micro_batch, total)
        else:
            self.of_step = max(self.of_step, total)
        if total > self.most.total:
            self.most = _Most(total, self.running.copy(), actor)
            self.since.clear()

    def peak(self) -> Peak:
        """The memory that was held when it was most: what is held now, but for what has come and gone since."""
        storages, now = set(self.storages), self.now.copy()
        for storage in reversed(self.since):
            came = storage in storages
            (storages.remove if came else storages.add)(storage)
            now[storage.kind] += -storage.bytes if came else storage.bytes
        running = self.most.running
        kinds = sum((extra.kinds for extra in running.values()), now)
        found: dict[str, list[Bytes]] = {}
        inside = (self.acts[actor].live(extra.taken) for actor, extra in running.items())
        held = ((each.register, each.bytes) for each in storages)
        for name, size in chain(held, *(live.items() for live in inside)):
            found.setdefault(name, []).append(size)
        sizes = [Held(name, len(each), Bytes(sum(each))) for name, each in found.items()]
        sizes.sort(key=lambda each: (-each.bytes, each.register))
        highest = Bytes(self.of_micro_batch), Bytes(self.of_step)
        return Peak(self.plan.rank, Memory.of(kinds), tuple(sizes), self.most.actor, *highest)
