"""Ranks that are alike are planned once: the plans are those of planning every rank, and no others are folded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, MLP, classification_loss, token_batch, token_loss, vector_batch
from weft.capture import Captured, capture
from weft.compiler import pipeline
from weft.compiler.context import options_of
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.schedule.equal_ranks.rank_classes import like
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import strategy_hints
from weft.errors import InternalError
from weft.ir.plan import Communicator

S, B = weft.split, weft.broadcast


@cache
def captured(name: str, batch: int) -> Captured:
    words = {"gpt": 17, "even gpt": 16}.get(name)
    model: nn.Module = GPT(words) if words else MLP().double()
    example = token_batch(batch, vocabulary=words) if words else vector_batch(batch)
    loss_fn = token_loss if words else classification_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return capture(model, loss_fn, optimizer, example)


def planned(case: str, ranks: Sequence[int] | None = None) -> Compiled:
    name, batch, grid, strategy = CASES[case]
    placement, options = weft.placement("cpu", grid), options_of(strategy)
    graph = captured(name, batch).graph
    hints = strategy_hints(strategy, graph, stage_placements(options.stages, placement))
    return compile_graph(graph, hints, placement, ranks or placement.ranks, options)


# Where nothing is put in the place of a pass.
planned_once = cache(planned)


def grid(*shape: int) -> Any:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).tolist()


def piped(**fields: Any) -> weft.Strategy:
    return weft.Strategy(**{"batch": {"*": S(0)}, "parameters": {"*": B}, **fields})


TENSOR = replace(
    weft.hybrid_parallel(["blocks.*.up"], ["blocks.*.down"]), stages=2, micro_batches=2
)
ONE = weft.Zero(1)
# Model, batch, grid, strategy; below, how many ranks are planned.
CASES: dict[str, tuple[str, int, Any, weft.Strategy]] = {
    "data": ("mlp", 16, grid(4), piped(micro_batches=2)),
    "stages x data": ("gpt", 8, grid(2, 2), piped(stages=2, micro_batches=2)),
    "stages x data, zero 1": ("gpt", 8, grid(2, 2), piped(stages=2, micro_batches=2, zero=ONE)),
    "stages x data, zero 3": (
        "mlp",
        16,
        grid(2, 4),
        piped(stages=2, micro_batches=2, zero=weft.Zero(3)),
    ),
    "stages x data x tensor": ("gpt", 8, grid(4, 2), TENSOR),
    "even stages x data x tensor": ("even gpt", 8, grid(4, 2), TENSOR),
    "even stages x data x tensor, limited": (
        "even gpt",
        8,
        grid(4, 2),
        replace(TENSOR, memory_limit=1 << 20),
    ),
    "stages x data x tensor, zero 1": ("gpt", 8, grid(4, 2), replace(TENSOR, zero=ONE)),
    "interleaved": ("gpt", 8, grid(1, 2), piped(stages=2, micro_batches=2, schedule="gpipe")),
    "uneven batch": ("mlp", 14, grid(2, 3), piped(stages=2, micro_batches=2)),
    "uneven parameters": ("mlp", 16, grid(2, 3), piped(stages=2, micro_batches=2, zero=ONE)),
    "uneven, both axes": (
        "mlp",
        12,
        grid(4, 3),
        replace(TENSOR, parameters={"*.weight": (B, S(0))}),
    ),
}


def every_rank(
    graph: Any, communicators: Sequence[Communicator], ranks: Sequence[int], *_: object
) -> dict[int, int]:
    """No rank is like another."""
    return {rank: rank for rank in ranks}


@pytest.mark.parametrize("case", CASES)
def test_plans_are_those_of_planning_every_rank(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = planned_once(case)
    monkeypatch.setattr(pipeline, "rank_classes", every_rank)
    apart = planned(case)
    assert str(folded.plan) == str(apart.plan)
    assert folded.peaks == apart.peaks
    assert folded.fingerprint == apart.fingerprint
    for plan in apart.plan.ranks:
        assert folded.schedule.timeline(plan.rank) == apart.schedule.timeline(plan.rank)


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_a_class_have_the_same_local_shapes(case: str) -> None:
    compiled = planned_once(case)
    shapes = {
        program.rank: [(value.name, value.shape) for value in program.values.values()]
        for program in compiled.programs
    }
    for rank, first in compiled.schedule.classes.items():
        assert shapes[rank] == shapes[first]


@pytest.mark.parametrize(
    ("case", "classes"),
    [
        ("data", [0]),
        ("stages x data, zero 1", [0, 2]),
        ("stages x data, zero 3", [0, 4]),
        ("stages x data x tensor", [0, 4]),
        ("even stages x data x tensor", [0, 4]),
        ("even stages x data x tensor, limited", [0, 1, 4, 5]),
    ],
)
def test_one_rank_of_each_class_is_localized(
    case: str, classes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    localize_all = pipeline.localize_all  # type: ignore[attr-defined]
    asked: list[Any] = []

    def counted(graph: Any, ranks: Sequence[int], *arguments: Any) -> Any:
        asked.extend(ranks)
        return localize_all(graph, ranks, *arguments)

    monkeypatch.setattr(pipeline, "localize_all", counted)
    compiled = planned(case, [classes[0]])
    assert asked == classes
    assert sorted(set(compiled.schedule.classes.values())) == classes


@pytest.mark.thorough
def test_a_rank_alone_gets_the_plan_that_it_gets_among_all() -> None:
    every = planned_once("stages x data x tensor, zero 1")
    for plan in every.plan.ranks:
        alone = planned("stages x data x tensor, zero 1", [plan.rank])
        assert alone.plan.ranks == (plan,)
        assert alone.fingerprint == every.fingerprint
        assert alone.peaks == tuple(peak for peak in every.peaks if peak.rank == plan.rank)


def test_uneven_shards_are_not_folded() -> None:
    classes = planned_once("uneven batch").schedule.classes
    assert classes[0] != classes[2]


def test_ranks_that_are_not_alike_cannot_share_copies_and_orders() -> None:
    one, other = planned("stages x data", [0, 2]).plan.ranks
    with pytest.raises(InternalError, match="ranks 2 and 0 were planned as equal, but differ in"):
        like(one, other)
