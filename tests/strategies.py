"""What property tests draw: one generator for each kind of thing, for all tests.

A law is a test that holds for all of them; `law(n)` runs it for n examples, the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pipelines import pipeline
from weft.compiler.schedule.actor_graph import with_copies
from weft.compiler.schedule.credits import enough_slots, fewest_slots, preset_slots
from weft.compiler.schedule.presets import Preset
from weft.errors import InternalError
from weft.ir.plan import Compute, LocalCall, LocalValue, RankPlan, Register
from weft.simulator.clock import simulate_step
from weft.strategy.parts import Schedule
from weft.units import Seconds

Test = TypeVar("Test", bound=Callable[..., Any])

QUEUES = ("compute", "host", "comm:0", "comm:1")
# Micro-batches of plans that are drawn.
MICRO_BATCHES = 3


def law(examples: int) -> Callable[[Test], Test]:
    """Settings of a property test: so many examples, drawn alike in every run, however slow the machine."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def local_value(name: str) -> LocalValue:
    """One number."""
    return LocalValue(name, (1,), "float32")


# ------------------------------------------------------------------------------- plans of one rank


def rank_plan(
    queues: Sequence[str], edges: Sequence[tuple[int, tuple[int, ...], int, bool]]
) -> RankPlan:
    """A plan from the queue of every actor, and (producer, consumers, credits, full) for every register."""
    names = [f"r{index}" for index in range(len(edges))]
    actors = []
    for id, queue in enumerate(queues):
        reads = tuple(name for name, edge in zip(names, edges, strict=True) if id in edge[1])
        writes = tuple(name for name, edge in zip(names, edges, strict=True) if edge[0] == id)
        actors.append(Compute(id, (), reads, writes, queue))
    registers = tuple(
        Register(local_value(name), "activation", producer, consumers, credits, full)
        for name, (producer, consumers, credits, full) in zip(names, edges, strict=True)
    )
    return RankPlan(0, (), tuple(actors), registers)


@st.composite
def rank_plans(draw: st.DrawFn, cyclic: bool = False) -> RankPlan:
    """A plan whose actors act once a step.

    Edges go from lower to higher ids, or, when full or `cyclic`, also back: some plans are not live.
    """
    count = draw(st.integers(1, 9))
    queues = [draw(st.sampled_from(QUEUES)) for _ in range(count)]
    edges = []
    for _ in range(draw(st.integers(0, 10))):
        producer = draw(st.integers(0, count - 1))
        full = draw(st.booleans())
        others = [id for id in range(count) if id != producer and (full or cyclic or id > producer)]
        consumers = draw(st.sets(st.sampled_from(others), max_size=3)) if others else set()
        edges.append((producer, tuple(sorted(consumers)), draw(st.integers(1, 3)), full))
    return rank_plan(queues, edges)


@st.composite
def looped_plans(draw: st.DrawFn, enough_slots: bool = False) -> RankPlan | None:
    """A plan some of whose actors act for each micro-batch, with orders; None for one that gets stuck.

    Edges lead to higher ids, or back from the version before (full). With `enough_slots` copies for all
    micro-batches no plan is stuck.
    """
    count = draw(st.integers(2, 7))
    loops = [draw(st.booleans()) for _ in range(count)]
    registers: list[Register] = []
    for index in range(draw(st.integers(1, 9))):
        producer = draw(st.integers(0, count - 1))
        full = draw(st.booleans())
        others = [id for id in range(count) if id != producer and (full or id > producer)]
        consumers = draw(st.sets(st.sampled_from(others), max_size=3)) if others else set()
        looped = loops[producer] and all(loops[id] for id in consumers)
        each = looped and draw(st.booleans()) and not (full and enough_slots)
        credits = MICRO_BATCHES if enough_slots else draw(st.integers(1, MICRO_BATCHES))
        register = Register(
            local_value(f"r{index}"),
            "activation",
            producer,
            tuple(sorted(consumers)),
            credits,
            full,
            MICRO_BATCHES if each else 1,
        )
        registers.append(register)
    actors = []
    for id, looped in enumerate(loops):
        reads = tuple(r.value.name for r in registers if id in r.consumers)
        made = [r for r in registers if id == r.producer]
        writes = tuple(r.value.name for r in made)
        nodes = over_step(*(r.value.name for r in made if r.rate == 1)) if looped else ()
        acts = MICRO_BATCHES if looped else 1
        queue, priority = draw(st.sampled_from(QUEUES)), draw(st.integers(0, 2))
        actors.append(Compute(id, nodes, reads, writes, queue, acts, priority))
    return ordered(RankPlan(0, (), tuple(actors), tuple(registers), MICRO_BATCHES))


def over_step(*names: str) -> tuple[LocalCall, ...]:
    """Calls that make values over a step, so that a plan is legal."""
    return tuple(LocalCall.of("weft.accumulate", (1,), (local_value(name),)) for name in names)


def ordered(plan: RankPlan) -> RankPlan | None:
    """The plan with orders for its communicators, as a simulation finds them; None if it is stuck."""
    try:
        found = simulate_step([plan], {0: [Seconds(1.0)] * len(plan.actors)})
    except InternalError:
        return None
    return replace(plan, orders=found.orders[0])


# ----------------------------------------------------------------------------- plans of many ranks


@st.composite
def pipeline_plans(draw: st.DrawFn) -> tuple[RankPlan, ...]:
    """The plans of all ranks of a pipeline, by a named schedule or with few copies; without orders."""
    stages = draw(st.integers(2, 4))
    micro_batches = draw(st.integers(1, 5))
    name: Schedule = draw(st.sampled_from(("gpipe", "1f1b")))
    rule = Preset(name, stages, stages, micro_batches)
    actor_graph = pipeline(rule, split=draw(st.booleans()))
    copies = draw(
        st.sampled_from(
            (preset_slots(actor_graph, rule), fewest_slots(actor_graph), enough_slots(actor_graph))
        )
    )
    return tuple(with_copies(plan, copies) for plan in actor_graph.plans)


# ------------------------------------------------------------------------------------------- times


def durations(plan: RankPlan) -> st.SearchStrategy[list[float]]:
    """Seconds of an act of each actor: halves, so that sums are exact, zero among them."""
    return st.lists(
        st.integers(0, 12).map(lambda halves: halves / 2),
        min_size=len(plan.actors),
        max_size=len(plan.actors),
    )
