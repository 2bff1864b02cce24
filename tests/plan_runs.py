"""Machines in tests: one that starts what may act after every event, and a rank whose acts take no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from weft.actors import Act, Action, Event, Finished, QueueMachine, RankDriver, waiting_text
from weft.errors import InternalError
from weft.ir.plan import RankPlan


def react(machine: QueueMachine, event: Event) -> tuple[Action | Act, ...]:
    """What a machine says to an event, and the act that it starts then."""
    actions = machine.handle(event)
    act = machine.start()
    return (*actions, act) if act is not None else tuple(actions)


def ready(machine: QueueMachine) -> tuple[Act, ...]:
    """The acts that may start now, first to last; none while one runs."""
    state = machine.state()
    entries = sorted(state.ready) if state.running is None else ()
    return tuple(Act(id, step, micro) for step, _, micro, id in entries)


@dataclass
class Instant:
    """An executor whose acts take no time; it notes them."""

    acts: list[Act] = field(default_factory=list)

    def start(self, act: Act) -> bool:
        self.acts.append(act)
        return True

    def free(self, register: str, version: int) -> None:
        pass


def run_plan(plan: RankPlan, steps: int = 2) -> tuple[Act, ...]:
    """The acts of some steps of a plan, all of them in flight at once, as they start."""
    instant = Instant()
    driver = RankDriver(plan, instant)
    for step in range(steps):
        driver.begin(step)
    while driver.go_on():
        pass
    statistics = driver.statistics()
    if not all(queue.idle for queue in statistics):
        raise InternalError(f"the plan is stuck:\n{waiting_text(plan, statistics)}")
    return tuple(instant.acts)


def sequential(plan: RankPlan) -> Callable[[int, int], int]:
    """What each act computes, by actor and number, told from what it reads, in no order at all."""
    registers = {register.value.name: register for register in plan.registers}

    @cache
    def content(name: str, version: int) -> object:
        register = registers[name]
        if version < register.full:
            return (name, "start")
        per = plan.actors[register.producer].acts // register.rate
        first = (version - register.full) * per
        return tuple(act(register.producer, index) for index in range(first, first + per))

    @cache
    def act(id: int, index: int) -> int:
        actor = plan.actors[id]
        reads = [(name, registers[name].rate) for name in actor.consumes]
        return hash(
            (id, index, *(content(name, index * rate // actor.acts) for name, rate in reads))
        )

    return act


class Acts:
    """What the acts of a plan compute, in memory that has just the copies of the registers.

    Attributes:
        done: what each act has computed, by actor and number.
    """

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self.done: dict[tuple[int, int], int] = {}
        self._registers = {register.value.name: register for register in plan.registers}
        # The version that lies in each copy, and what it is; versions take the copies in turn.
        self._copies: dict[tuple[str, int], tuple[int, object]] = {
            (n, 0): (0, (n, "start")) for n, r in self._registers.items() if r.full
        }
        # For each register, parts of the version that is being made.
        self._parts: dict[str, list[int]] = {}

    def start(self, act: Act) -> None:
        """Read all that an act reads, and spoil the copies that it is going to write."""
        index, actor = self._index(act), self.plan.actors[act.actor]
        reads = [self._read(name, index, actor.acts) for name in actor.consumes]
        self.done[actor.id, index] = hash((actor.id, index, *reads))
        for name in actor.produces:
            version = self._made(name, index, actor.acts)
            self._copies.pop((name, version % self._registers[name].credits), None)

    def finish(self, act: Act | Finished) -> None:
        """Write what an act makes."""
        index, actor = self._index(act), self.plan.actors[act.actor]
        for name in actor.produces:
            register = self._registers[name]
            parts = self._parts.setdefault(name, [])
            parts.append(self.done[actor.id, index])
            if len(parts) == actor.acts // register.rate:
                version = self._made(name, index, actor.acts)
                value = tuple(self._parts.pop(name))
                self._copies[name, version % register.credits] = (version, value)

    def _read(self, name: str, index: int, acts: int) -> object:
        register = self._registers[name]
        version = index * register.rate // acts
        there, value = self._copies[name, version % register.credits]
        assert there == version, f"{name}: version {version} is read, version {there} is there"
        return value

    def _made(self, name: str, index: int, acts: int) -> int:
        register = self._registers[name]
        return index * register.rate // acts + register.full

    def _index(self, act: Act | Finished) -> int:
        return act.step * self.plan.actors[act.actor].acts + act.micro
