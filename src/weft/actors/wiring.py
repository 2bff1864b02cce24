"""The wiring of one queue of a plan: its actors, and the registers they touch as ports."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import final

from weft.errors import InternalError
from weft.ir.plan import Actor, Hold, RankPlan, Register


@final
@dataclass(slots=True, eq=False)
class QueueActor:
    """An actor of this queue.

    Attributes:
        id: the actor's id.
        acts: acts per step.
        priority: lower numbers go first within a step.
        acted: acts started so far; the next one belongs to step `acted // acts`.
        waits: conditions that the next act still lacks: its step begun, an unread version of every
            consumed register, a free copy of every produced one. The actor may act iff it is 0.
        consumes, produces: ports of which every act reads or makes a version, without those of
            constants.
        holds, fills: ports of which all acts of a step together read or make one version; it is
            taken by the first of them and given on by the last.
    """

    id: int
    acts: int = 1
    priority: int = 0
    acted: int = 0
    waits: int = 1
    consumes: tuple[Port, ...] = ()
    produces: tuple[Port, ...] = ()
    holds: tuple[Port, ...] = ()
    fills: tuple[Port, ...] = ()


@final
@dataclass(slots=True, eq=False)
class Port:
    """A register as one queue sees it.

    Attributes:
        register: its name.
        full: 1 when a version was there before the first step, else 0.
        credits: copies that may exist.
        source: the producer's queue.
        producer: the producer, when it is on this queue.
        span: how many acts of the producer make one version.
        readers: actors of this queue of which every act reads a version.
        holders: actors of this queue that read one version in all acts of a step.
        count: how many readers and holders there are.
        queues: other queues with readers; empty unless the producer is here.
        arrived: versions that have been there so far; version `v` may be read iff `arrived > v`.
        local: for every version that this queue still reads: readers that have not finished with
            it, at least one.
        remote: for every version sent to other queues: how many of those have not released it.
        taken: copies made or being made and not free again, `0 <= taken <= credits`; kept by the
            producer's queue.
    """

    register: str
    full: int
    credits: int
    source: str
    producer: QueueActor | None = None
    span: int = 1
    readers: list[QueueActor] = field(default_factory=list)
    holders: list[QueueActor] = field(default_factory=list)
    count: int = 0
    queues: tuple[str, ...] = ()
    arrived: int = 0
    local: dict[int, int] = field(default_factory=dict)
    remote: dict[int, int] = field(default_factory=dict)
    taken: int = 0


def wire(
    plan: RankPlan, queue: str, alike: Mapping[str, str] | None = None
) -> tuple[tuple[QueueActor, ...], dict[str, Port]]:
    """Actors (in plan order) and ports (by register) of one queue, as before the first step.

    Args:
        plan: of the rank.
        queue: its name.
        alike: what `equal_registers` found, when one of equal registers is to stand for all.
    """
    ports: dict[str, Port] = {}
    actors = [_wired(each, plan, ports, alike) for each in plan.on_queue.get(queue, ())]
    for port in ports.values():
        _fill(port)
    for actor in actors:
        actor.waits += sum(not port.arrived for port in (*actor.consumes, *actor.holds))
        actor.waits += sum(port.taken == port.credits for port in (*actor.produces, *actor.fills))
    return tuple(actors), ports


def equal_registers(plan: RankPlan) -> dict[str, str]:
    """For each register, by name, the first that the same actors make and read as often, with as many copies.

    They get and lose their versions together, so one of them decides for all when an actor may act.
    """
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for each in plan.registers:
        key = each.producer, each.consumers, each.credits, each.full, each.rate
        found[each.value.name] = first.setdefault(key, each.value.name)
    return found


def issue_slots(
    plan: RankPlan, queue: str, actors: tuple[QueueActor, ...]
) -> tuple[QueueActor, ...]:
    """The actors of one step's acts on an in-order queue, one after the other."""
    for order in plan.orders:
        if order.queue == queue:
            by_id = {actor.id: actor for actor in actors}
            return tuple(by_id[actor] for actor, _ in order.acts)
    if any(actor.acts > 1 for actor in actors):
        raise InternalError(f"rank {plan.rank}: no order is given for the micro-batches of {queue}")
    return actors


def _wired(
    actor: Actor, plan: RankPlan, ports: dict[str, Port], alike: Mapping[str, str] | None
) -> QueueActor:
    wired = QueueActor(actor.id, actor.acts, actor.priority)
    registers = plan.register_of
    # A variable that only its producer touches needs no tokens: optimizer states, above all.
    made = _firsts(actor.produces, alike)
    produced = [name for name in made if registers[name].consumers or not registers[name].full]
    read = _firsts(actor.consumes, alike)
    consumed = [
        name for name in read if not isinstance(plan.actors[registers[name].producer], Hold)
    ]
    for name in produced:
        port = _port(registers[name], plan, ports)
        port.producer = wired
        port.span = actor.acts // registers[name].rate
        # The queues of a register's consumers, but for that of its producer.
        register = registers[name]
        queues = (plan.actors[id].queue for id in register.consumers)
        port.queues = tuple(dict.fromkeys(queue for queue in queues if queue != actor.queue))
    for name in consumed:
        port = _port(registers[name], plan, ports)
        (port.readers if actor.acts == registers[name].rate else port.holders).append(wired)
        port.count += 1
    each = {name for name in (*consumed, *produced) if registers[name].rate == actor.acts}
    wired.consumes, wired.holds = _by_rate(consumed, each, ports)
    wired.produces, wired.fills = _by_rate(produced, each, ports)
    return wired


def _firsts(names: tuple[str, ...], alike: Mapping[str, str] | None) -> tuple[str, ...]:
    return names if alike is None else tuple(dict.fromkeys([alike[name] for name in names]))


def _by_rate(
    names: list[str], each: Collection[str], ports: Mapping[str, Port]
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """The ports of registers that have a version for each act, and of the others."""
    return (
        tuple(ports[name] for name in names if name in each),
        tuple(ports[name] for name in names if name not in each),
    )


def _port(register: Register, plan: RankPlan, ports: dict[str, Port]) -> Port:
    name = register.value.name
    if name not in ports:
        source = plan.actors[register.producer].queue
        ports[name] = Port(name, int(register.full), register.credits, source)
    return ports[name]


def _fill(port: Port) -> None:
    """Put the version that is there before the first step; without a reader its copy is free."""
    if not port.full:
        return
    port.arrived = 1
    if port.count:
        port.local[0] = port.count
    if port.queues:
        port.remote[0] = len(port.queues)
    port.taken = int(port.producer is not None and bool(port.count or port.queues))
