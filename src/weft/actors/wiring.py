"""How one queue of a plan is wired: its actors as tasks, the registers they touch as ports."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.ir.plan import Actor, Hold, RankPlan, Register
from weft.ir.verify_plan import verify_plan


@dataclass(slots=True, eq=False)
class Task:
    """An actor of this queue.

    Attributes:
        id: the actor's id.
        acted: acts started so far, which is the step of the next one.
        waits: conditions that the next act still lacks: its step begun, an unread version of every
            consumed register, a free copy of every produced one. The task may act iff it is 0.
        consumes, produces: ports of its registers, without those of constants.
    """

    id: int
    acted: int = 0
    waits: int = 1
    consumes: tuple[Port, ...] = ()
    produces: tuple[Port, ...] = ()


@dataclass(slots=True, eq=False)
class Port:
    """A register as one queue sees it.

    Attributes:
        register: its name.
        full: 1 when a version was there before the first step, else 0.
        credits: copies that may exist.
        source: the producer's queue.
        producer: the producer, when it is on this queue.
        readers: tasks of this queue that read it.
        queues: other queues with readers; empty unless the producer is here.
        arrived: versions that have been there so far; a reader may act for step `s` iff `arrived >
            s`.
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
    producer: Task | None = None
    readers: list[Task] = field(default_factory=list)
    queues: tuple[str, ...] = ()
    arrived: int = 0
    local: dict[int, int] = field(default_factory=dict)
    remote: dict[int, int] = field(default_factory=dict)
    taken: int = 0


def wire(plan: RankPlan, queue: str) -> tuple[tuple[Task, ...], dict[str, Port]]:
    """Tasks (in plan order) and ports (by register) of one queue, in the state before the first step.

    Raises:
        InternalError: when actors and registers of the plan do not fit each other.
    """
    verify_plan(plan)
    registers = {register.value.name: register for register in plan.registers}
    ports: dict[str, Port] = {}
    tasks = []
    for actor in plan.actors:
        if actor.queue == queue and not isinstance(actor, Hold):
            tasks.append(_task(actor, plan, registers, ports))
    for port in ports.values():
        _fill(port)
    for task in tasks:
        task.waits += sum(not port.arrived for port in task.consumes)
        task.waits += sum(port.taken == port.credits for port in task.produces)
    return tuple(tasks), ports


def _task(
    actor: Actor, plan: RankPlan, registers: dict[str, Register], ports: dict[str, Port]
) -> Task:
    task = Task(actor.id)
    # A variable that only its producer touches needs no tokens: optimizer states, above all.
    produced = [
        name for name in actor.produces if registers[name].consumers or not registers[name].full
    ]
    for name in produced:
        port = _port(registers[name], plan, ports)
        port.producer = task
        queues = (plan.actors[id].queue for id in registers[name].consumers)
        port.queues = tuple(dict.fromkeys(other for other in queues if other != actor.queue))
    consumed = [name for name in actor.consumes if not _is_constant(registers[name], plan)]
    for name in consumed:
        _port(registers[name], plan, ports).readers.append(task)
    task.consumes = tuple(ports[name] for name in consumed)
    task.produces = tuple(ports[name] for name in produced)
    return task


def _is_constant(register: Register, plan: RankPlan) -> bool:
    return isinstance(plan.actors[register.producer], Hold)


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
    if port.readers:
        port.local[0] = len(port.readers)
    if port.queues:
        port.remote[0] = len(port.queues)
    port.taken = int(port.producer is not None and bool(port.readers or port.queues))
