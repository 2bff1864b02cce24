"""Random strategies on random grids: what is planned once for equal ranks is what planning every rank gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import weft
from mixtures import Model
from models import GPT, MLP, classification_loss, token_batch, token_loss, vector_batch
from rank_by_rank import classes_rank_by_rank
from weft.capture import capture
from weft.compiler import pipeline
from weft.compiler.context import Context, Options, options_of
from weft.compiler.hints import Hints
from weft.compiler.local.localize import communicators
from weft.compiler.passes import run_on_graph
from weft.compiler.pipeline import TRANSFORM, Compiled, compile_graph, lay
from weft.compiler.schedule.equal_ranks.rank_classes import rank_classes
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import strategy_hints
from weft.errors import UserError
from weft.ir.logical import LogicalGraph
from weft.ir.plan import Communicator
from weft.layout import Placement

S, B = weft.split(0), weft.broadcast
COLUMNS, ROWS = ["blocks.*.up"], ["blocks.*.down"]


@cache
def captured(name: str, batch: int) -> LogicalGraph:
    torch.manual_seed(0)
    if name == "mlp":
        model, example = MLP(), vector_batch(batch)
        loss = classification_loss
    else:
        model = Model() if name == "mixture" else GPT(16 if name == "even gpt" else 17)
        example, loss = token_batch(batch, vocabulary=13), token_loss
    return capture(model, loss, torch.optim.AdamW(model.parameters(), lr=0.1), example).graph


class Case:
    """A step, its ranks, and how they are used."""

    def __init__(self, model: str, batch: int, grid: Sequence[int], strategy: weft.Strategy):
        self.model, self.batch, self.grid, self.strategy = model, batch, grid, strategy

    def __repr__(self) -> str:
        return f"Case({self.model!r}, {self.batch}, {self.grid}, {self.strategy})"

    def given(self) -> tuple[LogicalGraph, dict[int, Hints], Placement, Options]:
        ranks = torch.arange(prod(self.grid)).reshape(tuple(self.grid)).tolist()
        placement, options = weft.placement("cpu", ranks), options_of(self.strategy)
        graph = captured(self.model, self.batch)
        places = stage_placements(options.stages, placement)
        return graph, strategy_hints(self.strategy, graph, places), placement, options

    def laid(self) -> LogicalGraph:
        graph, hints, placement, options = self.given()
        graph, context = run_on_graph(TRANSFORM, graph, Context(placement, options, hints))
        return lay(graph, context).graph

    def compiled(self) -> Compiled:
        graph, hints, placement, options = self.given()
        return compile_graph(graph, hints, placement, placement.ranks, options)


@st.composite
def cases(draw: st.DrawFn, ranks: int = 54) -> Case:
    model = draw(st.sampled_from(("mlp", "mlp", "gpt", "even gpt", "mixture")))
    stages = draw(st.sampled_from((0, 2, 2)))
    axes = draw(st.integers(1, 3))
    rest = draw(st.lists(st.integers(1, 3), min_size=axes - 1, max_size=axes - 1))
    first = draw(st.integers(2, 3)) * (draw(st.integers(1, 2)) if stages else 1)
    assume(first * prod(rest) <= ranks)
    micro_batches = draw(st.sampled_from((2, 3)))
    batch = draw(st.sampled_from((12, 18, 24, 30)))
    base = weft.Strategy(batch={"*": S}, parameters={"*": B})
    if model == "mixture":
        base = weft.expert_parallel(["*.up", "*.down"])
    elif "gpt" in model and axes == 2 and draw(st.booleans()):
        base = weft.hybrid_parallel(COLUMNS, ROWS)
    elif draw(st.booleans()):
        base = weft.Strategy(batch={"*": S})
    level = draw(st.sampled_from((None, 1, 2, 3)))
    strategy = replace(
        base,
        stages=stages or (),
        micro_batches=micro_batches,
        zero=None if level is None else weft.Zero(level),
        schedule=draw(st.sampled_from((None, "1f1b", "gpipe"))) if stages else None,
        memory_limit=draw(st.sampled_from((None, 1 << 30))),
    )
    return Case(model, batch, (first, *rest), strategy)


def every_rank(
    graph: LogicalGraph, groups: Sequence[Communicator], ranks: Sequence[int], *_: Any
) -> dict[int, int]:
    """No rank is like another."""
    return {rank: rank for rank in ranks}


@pytest.mark.thorough
@settings(max_examples=12, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_classes_are_those_of_looking_at_every_rank(case: Case, by_memory: bool) -> None:
    try:
        graph = case.laid()
    except UserError:
        assume(False)
    ranks = range(prod(case.grid))
    arguments = graph, communicators(graph), ranks, by_memory
    assert rank_classes(*arguments) == classes_rank_by_rank(*arguments)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(cases(ranks=6))
def test_folded_is_unfolded(case: Case) -> None:
    try:
        folded = case.compiled()
    except UserError:
        assume(False)
    with patch.object(pipeline, "rank_classes", every_rank):
        apart = case.compiled()
    assert str(folded.plan) == str(apart.plan)
    assert folded.peaks == apart.peaks
    assert folded.fingerprint == apart.fingerprint
    one, other = folded.schedule.simulation, apart.schedule.simulation
    assert one is not None
    assert other is not None
    assert one.makespan == other.makespan
    for plan in apart.plan.ranks:
        assert folded.schedule.timeline(plan.rank) == apart.schedule.timeline(plan.rank)
