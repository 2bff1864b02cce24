"""All queues of a rank together: random plans run to their end exactly when an oracle says that they are live."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_runs import react, run_plan
from strategies import QUEUES, law, local_value, rank_plan, rank_plans
from weft.actors import Act, Begin, EndStep, Finished, Send, machines
from weft.errors import InternalError
from weft.ir.plan import Collective, Communicate, Compute, Fetch, RankPlan, Register


def is_live(plan):
    """A marked graph is live iff it has no cycle of edges without a token (Commoner et al., 1971)."""
    graph: Any = nx.DiGraph()
    for register in plan.registers:
        for consumer in register.consumers:
            if not register.full:
                graph.add_edge(register.producer, consumer)
            if register.credits == register.full:
                graph.add_edge(consumer, register.producer)
    for queue in ("comm:0", "comm:1"):
        nx.add_path(graph, [actor.id for actor in plan.actors if actor.queue == queue])
    return nx.is_directed_acyclic_graph(graph)


@law(300)
@given(rank_plans(cyclic=True))
def test_a_plan_runs_to_its_end_iff_it_is_live(plan):
    if is_live(plan):
        acts = run_plan(plan, steps=3)
        assert Counter(acts) == {
            Act(actor.id, step): 1 for actor in plan.actors for step in range(3)
        }
    else:
        with pytest.raises(InternalError, match="stuck"):
            run_plan(plan, steps=3)


def run_randomly(plan, steps, seed):
    """Deliver messages between queues in a random order (kept on each edge between two queues) and end acts late.

    Returns the acts as (event, actor, step) in the order in which they started and finished.
    """
    chance = random.Random(seed)
    every = machines(plan)
    mail: Any = {(source, target): deque() for source in (*every, "begin") for target in every}
    for queue in every:
        mail["begin", queue].extend(Begin(step) for step in range(steps))
    log: Any = []
    ended: Any = Counter()
    while any(mail.values()):
        source, target = chance.choice(sorted(key for key, letters in mail.items() if letters))
        event = mail[source, target].popleft()
        if isinstance(event, Finished):
            log.append(("finish", event.actor, event.step))
        for action in react(every[target], event):
            if isinstance(action, Act):
                log.append(("start", action.actor, action.step))
                mail[target, target].append(Finished(*action))
            elif isinstance(action, Send):
                mail[target, action.queue].append(action.event)
            elif isinstance(action, EndStep):
                ended[target] += 1
    assert all(machine.statistics().idle for machine in every.values())
    assert ended == dict.fromkeys(every, steps)
    return log


def check_log(plan, log):
    """Versions are read after they are made, no register exceeds its credits, communicators keep their order."""
    started: Any = Counter()
    finished: Any = Counter()
    for event, id, step in log:
        if event == "start":
            assert started[id] == step
            started[id] += 1
        else:
            assert finished[id] == step
            finished[id] += 1
        for register in plan.registers:
            made = started[register.producer] + register.full
            done = min((finished[reader] for reader in register.consumers), default=None)
            if done is None:
                done = finished[register.producer] + register.full
            assert made - done <= register.credits
            for reader in register.consumers:
                assert started[reader] <= finished[register.producer] + register.full
    for queue in ("comm:0", "comm:1"):
        mine = [actor.id for actor in plan.actors if actor.queue == queue]
        order = [(step, id) for event, id, step in log if event == "start" and id in mine]
        assert order == sorted(order)


@law(200)
@given(rank_plans(), st.integers(0, 3))
def test_any_timing_keeps_credits_and_order(plan, seed):
    if not is_live(plan):
        return
    log = run_randomly(plan, 3, seed)
    check_log(plan, log)
    assert log == run_randomly(plan, 3, seed)


def test_a_stuck_plan_says_what_each_actor_waits_for():
    plan = rank_plan(["compute", "host"], [(0, (1,), 1, False), (1, (0,), 1, False)])
    with pytest.raises(InternalError) as caught:
        run_plan(plan)
    assert str(caught.value) == (
        "the plan is stuck:\n"
        "  rank 0: Compute 0 on compute waits in step 0 for r1 from Compute 1 on host\n"
        "  rank 0: Compute 1 on host waits in step 0 for r0 from Compute 0 on compute"
    )


def test_a_stuck_communication_is_named():
    collective = Collective("all_reduce", 0, local_value("g"), local_value("s"))
    plan = RankPlan(
        3,
        (),
        (
            Communicate(0, (collective,), "comm:0"),
            Fetch(1, ("g", "s"), ("s",)),
            Compute(2, (), ("s",), ("g",)),
        ),
        (
            Register(local_value("s"), "communication", 0, (1, 2)),
            Register(local_value("g"), "activation", 2, (0,)),
        ),
    )
    with pytest.raises(
        InternalError, match=r"rank 3: Communicate 0 on comm:0 \(all_reduce of g\) waits"
    ):
        run_plan(plan)


def test_the_simulation_is_the_same_every_time():
    plan = rank_plan(list(QUEUES) * 2, [(id, tuple(range(id + 1, 8)), 2, False) for id in range(7)])
    assert run_plan(plan, 4) == run_plan(plan, 4)
