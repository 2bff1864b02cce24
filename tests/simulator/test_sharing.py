"""Communications of planned steps share the links of a machine: which do, and that folded ranks do as unfolded ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import weft
from simulator.steps import captured_gpt, compiled_gpt, planned_gpt, tasks_of
from weft.compiler.context import options_of
from weft.compiler.pipeline import compile_graph
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import strategy_hints
from weft.hardware.planning_costs import TopologyCosts
from weft.hardware.topology_files import parse_topology
from weft.ir.plan import Communicate
from weft.planning.plans import planned_step
from weft.simulator import PlannedStep, simulate
from weft.simulator.acts import act_costs
from weft.simulator.sharing import SharedLinks
from weft.simulator.simulate import simulation_of, steady_steps


def machine(per_node: int, cards: int, nodes: int = 8) -> TopologyCosts:
    """Slow cards between nodes, so that a small model's gradients and activations meet on them."""
    content: dict[str, Any] = {
        "weft_topology": 1,
        "name": "slow",
        "links": {"fast": {"gb_per_second": 0.1}, "card": {"gb_per_second": 0.001}},
        "nodes": [
            {
                "count": nodes,
                "devices": {"kind": "cpu", "count": per_node},
                "switches": [{"name": "s", "link": "fast", "joins": "devices"}],
                "ports": [{"link": "card", "count": cards}],
            }
        ],
        "network": [{"name": "top"}],
    }
    return TopologyCosts(parse_topology(content, "slow"))


def step(stages: int, data: int, folded: bool = True) -> PlannedStep:
    plain = planned_gpt(stages, data, folded=folded)
    return replace(plain, families=compiled_gpt(stages, data, 4, "1f1b").families)


def shared(planned: PlannedStep, costs: TopologyCosts) -> SharedLinks:
    return SharedLinks(planned.plans, act_costs(planned, costs))


def test_gradients_and_activations_share_a_card():
    planned, costs = step(2, 2), machine(1, 1)
    sharing = shared(planned, costs).sharing
    # The first stage's ranks reduce gradients over the cards by which they reach the second one.
    pairs = [(a, b) for a, near in enumerate(sharing.near) for b in near if a < b]
    slower = [speed for pair in pairs for speed in sharing.speeds(pair).values() if speed < 1]
    # Less than a half each, but for the time of an act, in which nothing is sent.
    assert min(slower) == pytest.approx(0.5, rel=0.1)


def test_a_step_lasts_longer_where_links_are_shared():
    planned, costs = step(2, 4), machine(2, 1)
    acts = act_costs(planned, costs)
    unknown = {
        rank: [[one._replace(cost=one.cost._replace(links=None)) for one in own] for own in each]
        for rank, each in acts.parts.items()
    }
    alone = steady_steps(planned, replace(acts, parts=unknown), costs)
    beside = steady_steps(planned, acts, costs)
    assert simulation_of(planned, acts, costs, beside) == simulate(planned, costs)
    assert alone.step_seconds < beside.step_seconds < 1.5 * alone.step_seconds


@cache
def hybrid(zero: int | None) -> PlannedStep:
    """Two stages, each of a grid of two by two ranks, whose plans fold into one for each stage; all are planned."""
    columns, rows = ["blocks.*.up"], ["blocks.*.down"]
    strategy = replace(
        weft.hybrid_parallel(columns, rows),
        stages=2,
        micro_batches=2,
        schedule="1f1b",
        zero=None if zero is None else weft.Zero(zero),
    )
    placement = weft.placement("cpu", torch.arange(8).reshape(4, 2).tolist())
    options = options_of(strategy)
    places = stage_placements(options.stages, placement)
    hints = strategy_hints(strategy, captured_gpt(), places)
    compiled = compile_graph(captured_gpt(), hints, placement, placement.ranks, options)
    return planned_step(captured_gpt(), compiled)


@pytest.mark.parametrize("zero", [None, 3])
@pytest.mark.parametrize(("per_node", "cards"), [(1, 1), (2, 1), (4, 1)])
def test_folded_ranks_share_links_as_unfolded_ones(zero, per_node, cards):
    costs, planned = machine(per_node, cards), hybrid(zero)
    first = set(planned.classes.values())
    assert len(first) == 2
    folded = replace(planned, plans=[plan for plan in planned.plans if plan.rank in first])
    whole = replace(planned, classes={})
    assert shared(folded, costs).sharing.any
    one, every = simulate(folded, costs), simulate(whole, costs)
    assert (len(one.ranks), len(every.ranks)) == (2, 8)
    assert (one.step_seconds, one.first_seconds) == (every.step_seconds, every.first_seconds)


def test_each_communication_has_a_number_and_nothing_else_has():
    planned, costs = step(2, 2), machine(2, 1)
    acts = act_costs(planned, costs)
    tasks = tasks_of(planned.plans, {plan.rank: acts.seconds(plan.rank) for plan in planned.plans})
    of_rank = {plan.rank: plan for plan in planned.plans}
    for task, use in enumerate(SharedLinks(planned.plans, acts).uses(tasks)):
        rank, actor, _, _ = tasks.members[task][0]
        meets = isinstance(of_rank[rank].actors[actor], Communicate)
        assert (use >= 0) == (meets and tasks.seconds[task] > 0)
