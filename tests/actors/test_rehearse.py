"""All queues of a rank together: random plans run to their end exactly when an oracle says that they are live."""

from __future__ import annotations

import random
from collections import Counter, deque

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from build import value
from weft.actors import Act, Begin, EndStep, Finished, Send, machines, rehearse
from weft.errors import InternalError
from weft.ir.plan import Collective, Communicate, Compute, Fetch, RankPlan, Register

QUEUES = ("compute", "comm:0", "comm:1", "host")


def build(queues, edges):
    """A plan from the queue of every actor, and (producer, consumers, credits, full) for every register."""
    names = [f"r{index}" for index in range(len(edges))]
    actors = []
    for id, queue in enumerate(queues):
        reads = tuple(name for name, edge in zip(names, edges, strict=True) if id in edge[1])
        writes = tuple(name for name, edge in zip(names, edges, strict=True) if edge[0] == id)
        actors.append(Compute(id, (), reads, writes, queue))
    registers = tuple(
        Register(value(name), "activation", producer, consumers, credits, full)
        for name, (producer, consumers, credits, full) in zip(names, edges, strict=True)
    )
    return RankPlan(0, (), tuple(actors), registers)


@st.composite
def plans(draw, cyclic=False):
    """A random plan. Edges go from lower to higher ids, or, when full or `cyclic`, also back."""
    count = draw(st.integers(1, 9))
    queues = [draw(st.sampled_from(QUEUES)) for _ in range(count)]
    edges = []
    for _ in range(draw(st.integers(0, 10))):
        producer = draw(st.integers(0, count - 1))
        full = draw(st.booleans())
        others = [id for id in range(count) if id != producer and (full or cyclic or id > producer)]
        consumers = draw(st.sets(st.sampled_from(others), max_size=3)) if others else set()
        edges.append((producer, tuple(sorted(consumers)), draw(st.integers(1, 3)), full))
    return build(queues, edges)


def is_live(plan):
    """A marked graph is live iff it has no cycle of edges without a token (Commoner et al., 1971)."""
    graph = nx.DiGraph()
    for register in plan.registers:
        for consumer in register.consumers:
            if not register.full:
                graph.add_edge(register.producer, consumer)
            if register.credits == register.full:
                graph.add_edge(consumer, register.producer)
    for queue in ("comm:0", "comm:1"):
        nx.add_path(graph, [actor.id for actor in plan.actors if actor.queue == queue])
    return nx.is_directed_acyclic_graph(graph)


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(plans(cyclic=True))
def test_a_plan_runs_to_its_end_iff_it_is_live(plan):
    if is_live(plan):
        acts = rehearse(plan, steps=3)
        assert Counter(acts) == {
            Act(actor.id, step): 1 for actor in plan.actors for step in range(3)
        }
    else:
        with pytest.raises(InternalError, match="stuck"):
            rehearse(plan, steps=3)


def run_randomly(plan, steps, seed):
    """Deliver messages between queues in a random order (kept on each edge between two queues) and end acts late.

    Returns the acts as (event, actor, step) in the order in which they started and finished.
    """
    chance = random.Random(seed)
    every = machines(plan)
    mail = {(source, target): deque() for source in (*every, "begin") for target in every}
    for queue in every:
        mail["begin", queue].extend(Begin(step) for step in range(steps))
    log, ended = [], Counter()
    while any(mail.values()):
        source, target = chance.choice(sorted(key for key, letters in mail.items() if letters))
        event = mail[source, target].popleft()
        if isinstance(event, Finished):
            log.append(("finish", event.actor, event.step))
        for action in every[target].handle(event):
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
    started, finished = Counter(), Counter()
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


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(plans(), st.integers(0, 3))
def test_any_timing_keeps_credits_and_order(plan, seed):
    if not is_live(plan):
        return
    log = run_randomly(plan, 3, seed)
    check_log(plan, log)
    assert log == run_randomly(plan, 3, seed)


def test_a_stuck_plan_says_what_each_actor_waits_for():
    plan = build(["compute", "host"], [(0, (1,), 1, False), (1, (0,), 1, False)])
    with pytest.raises(InternalError) as caught:
        rehearse(plan)
    assert str(caught.value) == (
        "the plan is stuck:\n"
        "  rank 0: Compute 0 on compute waits in step 0 for r1 from Compute 1 on host\n"
        "  rank 0: Compute 1 on host waits in step 0 for r0 from Compute 0 on compute"
    )


def test_a_stuck_communication_is_named():
    collective = Collective("all_reduce", 0, value("g"), value("s"))
    plan = RankPlan(
        3,
        (),
        (
            Communicate(0, (collective,), "comm:0"),
            Fetch(1, ("g", "s"), ("s",)),
            Compute(2, (), ("s",), ("g",)),
        ),
        (
            Register(value("s"), "communication", 0, (1, 2)),
            Register(value("g"), "activation", 2, (0,)),
        ),
    )
    with pytest.raises(
        InternalError, match=r"rank 3: Communicate 0 on comm:0 \(all_reduce of g\) waits"
    ):
        rehearse(plan)


def test_the_rehearsal_is_the_same_every_time():
    plan = build(list(QUEUES) * 2, [(id, tuple(range(id + 1, 8)), 2, False) for id in range(7)])
    assert rehearse(plan, 4) == rehearse(plan, 4)
