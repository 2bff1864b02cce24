"""Machines that check themselves: a state that is wrong is named by its rule, a machine that is wrong is caught."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import pytest

from plan_runs import Instant, run_plan
from weft.actors import Begin, QueueMachine, RankDriver, Ready, machines
from weft.actors.invariants import VARIABLE, check_rank, events_between_checks
from weft.errors import InternalError
from weft.ir.plan import Compute, Feed, Fetch, LocalCall, LocalValue, Order, RankPlan, Register

M = 2


def register(
    name: str,
    producer: int,
    consumers: tuple[int, ...],
    credits: int = 1,
    full: bool = False,
    rate: int = 1,
) -> Register:
    value = LocalValue(name, (1,), "float32")
    return Register(value, "activation", producer, consumers, credits, full, rate)


def plan() -> RankPlan:
    """Feed -> x -> loop 1 -> y -> loops 2 (comm:0) and 3 -> total -> update 4 -> weight, read by both loops."""
    total = LocalCall.of("weft.accumulate", (1,), (LocalValue("total", (1,), "float32"),))
    return RankPlan(
        0,
        (),
        (
            Feed(0, ("x",), ("x",)),
            Compute(1, (), ("x", "weight"), ("y",), acts=M),
            Compute(2, (), ("y",), ("z",), "comm:0", acts=M),
            Compute(3, (total,), ("y", "z", "weight"), ("total",), acts=M),
            Compute(4, (), ("total",), ("weight",)),
            Fetch(5, ("total",), ("total",)),
        ),
        (
            register("x", 0, (1,)),
            register("weight", 4, (1, 3), full=True),
            register("y", 1, (2, 3), 2, rate=M),
            register("z", 2, (3,), rate=M),
            register("total", 3, (4, 5)),
        ),
        M,
        (Order("comm:0", tuple((2, micro) for micro in range(M))),),
    )


def in_the_middle() -> QueueMachine:
    """The compute queue while its first act runs, of which the second may follow."""
    machine = machines(plan())["compute"]
    machine.handle(Begin(0))
    machine.handle(Ready("x", 0))
    assert machine.start() == (1, 0, 0)
    return machine


def drop_task(machine: QueueMachine) -> None:
    machine._left[0] -= 1


def put(name: str, value: Any) -> Callable[[QueueMachine], None]:
    return lambda machine: setattr(machine, name, value)


def of_task(name: str, value: Any) -> Callable[[QueueMachine], None]:
    return lambda machine: setattr(machine._by_id[1], name, value)


def of_port(register: str, name: str, value: Any) -> Callable[[QueueMachine], None]:
    return lambda machine: setattr(machine._ports[register], name, value)


@pytest.mark.parametrize(
    ("corrupt", "rule"),
    [
        (of_task("acted", 5), "acts_follow_each_other: actor 1 has acted 5 times in 1 steps"),
        (of_task("acted", 2), "acts_follow_each_other: Act.* runs, the last"),
        (put("started", 3), "acts_follow_each_other: 3 acts were started"),
        (of_task("waits", 1), "conditions_are_counted: actor 1 waits for 1 conditions, but lacks 0"),
        (put("_ready", []), "who_may_act_is_ready"),
        (of_port("y", "taken", 2), "copies_are_within_credits: y has 2 copies, of 1"),
        (of_port("y", "credits", 0), "copies_are_within_credits: y has 1 copies of 0"),
        (of_port("x", "taken", 1), "copies_are_within_credits: x is made on host"),
        (of_port("weight", "local", {}), "versions_are_read_by_all: weight has readers left {}"),
        (of_port("x", "arrived", 0), "versions_are_read_by_all: x is read before version 0"),
        (of_port("y", "remote", {0: 2}), "other_queues_answer_once: y awaits 2 answers"),
        (of_port("y", "remote", {-1: 0}), "other_queues_answer_once: y awaits 0 answers"),
        (drop_task, "steps_end_when_all_have_acted"),
    ],
)  # fmt: skip
def test_a_wrong_state_is_named_by_the_rule_it_breaks(
    corrupt: Callable[[QueueMachine], None], rule: str
) -> None:
    machine = in_the_middle()
    machine.check_invariants()
    corrupt(machine)
    with pytest.raises(InternalError, match=f"queue compute breaks its invariants:[^$]*{rule}"):
        machine.check_invariants()


def test_a_heap_that_is_none_is_named() -> None:
    actors = tuple(Compute(id, (), (), ()) for id in range(3))
    machine = QueueMachine(RankPlan(0, (), actors, ()), "compute")
    machine.handle(Begin(0))
    machine._ready.reverse()
    with pytest.raises(InternalError, match="who_may_act_is_ready: no heap"):
        machine.check_invariants()


def test_an_act_out_of_turn_is_named() -> None:
    actors = tuple(Compute(id, (), (), (), "comm:0") for id in range(2))
    machine = QueueMachine(RankPlan(0, (), actors, ()), "comm:0", in_order=True)
    machine.handle(Begin(0))
    machine._turns = machine._turns[::-1]
    machine.start()
    machine._turns = machine._turns[::-1]
    with pytest.raises(InternalError, match="the_order_is_kept: actor 0 has acted 0 times"):
        machine.check_invariants()


def forget_the_copy(machine: Any, ports: Any) -> int:
    return 0


def release_at_once(machine: Any, ports: Any, version: int, actions: Any) -> None:
    for port in ports:
        machine._release(port, version, actions)


def ignore_conditions(machine: Any) -> Any:
    if machine.in_order:
        return machine._turns[machine.started % len(machine._turns)]
    return machine._by_id[heappop(machine._ready)[-1]] if machine._ready else None


def be_ready_twice(machine: Any, actor: Any) -> None:
    for _ in range(2):
        heappush(machine._ready, (*divmod(actor.acted, actor.acts), 0, actor.id))


def meet_again(machine: Any, actor: Any) -> None:
    actor.waits -= 2
    if actor.waits <= 0:
        machine._may_act(actor)


def keep_the_copy(machine: Any, port: Any, version: int) -> None:
    port.remote.pop(version, None)


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("_take", forget_the_copy),
        ("_read", release_at_once),
        ("_next", ignore_conditions),
        ("_may_act", be_ready_twice),
        ("_met", meet_again),
        ("_settle", keep_the_copy),
    ],
)
def test_a_machine_that_is_wrong_is_caught_by_its_checks(
    method: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(run_plan(plan(), 3)) == 3 * (3 + 3 * M)
    monkeypatch.setattr(QueueMachine, method, fault)
    with pytest.raises(InternalError, match="breaks its invariants"):
        run_plan(plan(), 3)


def test_queues_that_disagree_are_named() -> None:
    driver = RankDriver(plan(), Instant())
    driver.begin(0)
    states = {name: each.machine.state() for name, each in driver._drivers.items()}
    check_rank(states)
    while driver.go_on():
        pass
    check_rank(states := {name: each.machine.state() for name, each in driver._drivers.items()})
    states["comm:0"].ports["y"].arrived -= 1
    states["comm:0"].ports["y"].local[1] = 1
    states["compute"].ports["weight"].taken = 0
    with pytest.raises(InternalError) as error:
        check_rank(states)
    assert str(error.value).splitlines()[1:] == [
        "  y has 2 versions, 1 of them known",
        "  y: {1: 1} queues read, {} are awaited",
        "  weight holds 0 versions between two steps, not 1",
    ]


def test_checks_cost_nothing_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machines(plan())["compute"]._between == 1
    for off in ("", "0"):
        monkeypatch.setenv(VARIABLE, off)
        assert machines(plan())["compute"]._between == 0
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(QueueMachine, "check_invariants", lambda machine: pytest.fail("checked"))
    run_plan(plan(), 1)


def start_all(machine: QueueMachine) -> None:
    for actor in machine._actors[machine.started :]:
        machine.finish()
        machine.start_act(actor.id, 0)


def test_a_long_queue_is_checked_after_every_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    actors = tuple(Compute(id, (), (), ()) for id in range(64))
    machine = QueueMachine(RankPlan(0, (), actors, ()), "compute")
    assert events_between_checks(machine.state()) == machine._between == 17
    machine.handle(Begin(0))
    machine.start()
    machine._ready = []
    with pytest.raises(InternalError, match="who_may_act_is_ready"):
        start_all(machine)
