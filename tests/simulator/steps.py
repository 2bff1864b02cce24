"""Planned steps for tests: a small GPT in stages on some grid, compiled once for each case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch

import weft
from models import GPT, token_batch, token_loss
from weft.capture import capture
from weft.compiler.context import options_of
from weft.compiler.memory.walk import memory
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import strategy_hints
from weft.ir.logical import LogicalGraph
from weft.ir.plan import RankPlan
from weft.simulator import PlannedStep
from weft.simulator.tasks import Tasks, repeat_steps, step_tasks, to_ticks

SAMPLES, WORDS, TIME = 8, 16, 8


@cache
def captured_gpt() -> LogicalGraph:
    model = GPT(WORDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return capture(model, token_loss, optimizer, token_batch(SAMPLES, TIME, WORDS)).graph


@cache
def compiled_gpt(stages: int, data: int, micro_batches: int, schedule: str | None) -> Compiled:
    strategy = weft.Strategy(
        batch={"*": weft.split(0)},
        parameters={"*": weft.broadcast},
        stages=stages,
        micro_batches=micro_batches,
        schedule=schedule,
    )
    ranks = torch.arange(stages * data).reshape(stages, data).tolist()
    placement = weft.placement("cpu", ranks if stages > 1 else ranks[0])
    options, graph = options_of(strategy), captured_gpt()
    hints = strategy_hints(strategy, graph, stage_placements(options.stages, placement))
    return compile_graph(graph, hints, placement, placement.ranks, options)


def planned_gpt(
    stages: int = 2,
    data: int = 2,
    micro_batches: int = 4,
    schedule: str | None = "1f1b",
    folded: bool = True,
) -> PlannedStep:
    """A GPT in stages; `folded`: only the ranks that stand for others are planned."""
    compiled = compiled_gpt(stages, data, micro_batches, schedule)
    scheduled = compiled.schedule
    classes = scheduled.classes if folded else {}
    first = set(classes.values()) or {plan.rank for plan in scheduled.plans}
    plans = [plan for plan in scheduled.plans if plan.rank in first]
    peaks = {p.rank: memory(p, scheduled.moments(p.rank)).memory.peak for p in plans}
    return PlannedStep(
        compiled.graph,
        plans,
        compiled.plan.communicators,
        range(stages * data),
        classes,
        peaks=peaks,
        work=None,
        samples=SAMPLES,
        tokens=SAMPLES * TIME,
    )


def tasks_of(
    plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[float]], steps: int = 1
) -> Tasks:
    """The tasks of some steps of plans whose communicators have orders; `seconds` of each rank's actors."""
    ticks = {rank: [to_ticks(each) for each in own] for rank, own in seconds.items()}
    return repeat_steps(step_tasks(plans, ticks), steps)
