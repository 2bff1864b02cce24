"""Experts of mixtures, and candidates that split them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import weft
from mixtures import WORDS, Model, pair
from models import token_batch, token_loss
from search.jobs import begun, layers, least_memory_of, least_of
from weft.planning.stored_step import StoredStep
from weft.search.measures import Measures
from weft.search.space import space_of
from weft.search.steps.linears import Experts, experts_of


@cache
def mixture() -> StoredStep:
    model, _ = pair(layers=2)
    batch = token_batch(8, vocabulary=WORDS)
    return weft.Job(model, token_loss, torch.optim.AdamW(model.parameters()), batch).stored()


def test_they_are_read_off_the_step() -> None:
    found = experts_of(mixture().graph)
    assert {name.rpartition(".")[2] for name in found.parameters} >= {"up", "down"}
    assert found.count == 4
    assert experts_of(layers().graph) == Experts((), 0)


def test_their_states_count_with_them() -> None:
    """Of AdamW each element has two more; that others are frozen changes nothing."""
    model, _ = pair(layers=2)
    model.embedding.weight.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    batch = token_batch(8, vocabulary=WORDS)
    step = weft.Job(model, token_loss, torch.optim.AdamW(trained), batch).stored()
    experts = [p for name, p in model.named_parameters() if name.endswith((".up", ".down"))]
    elements = sum(each.numel() for each in experts)
    steps = 2 * 2  # a number of updates for each parameter, where the optimizer keeps one
    found = begun(step, "h100x4").facts.expert_bytes
    assert 3 * 4 * elements <= found <= 3 * 4 * elements + 4 * steps


def test_points_that_split_them_hold_less_and_keep_their_floors() -> None:
    found = begun(mixture(), "h100x4")
    every = space_of(found.facts, every_rank=True)
    split = every.where(every.experts & (every.micro_batches == 1) & (every.recompute == 0))
    assert len(split)
    for candidate in list(split)[::3]:
        if candidate.zero not in (0, 1) or candidate.schedule == "zero_bubble":
            continue
        strategy = found.strategy(candidate)
        assert all(name in strategy.parameters for name in found.facts.experts.parameters)
        measures = found.evaluator.of(strategy)
        assert isinstance(measures, Measures), (str(candidate), measures)
        assert least_of(found.lower_bounds, candidate) <= measures.seconds
        assert least_memory_of(found.lower_bounds, candidate) <= measures.memory


@pytest.mark.thorough
def test_a_search_splits_them_where_tokens_are_lighter_than_experts() -> None:
    with torch.device("meta"):
        model = Model(width=1024, experts=8)
    step = weft.Job(
        model, token_loss, torch.optim.AdamW(model.parameters()), token_batch(8, vocabulary=WORDS)
    ).stored()
    fixed = weft.Strategy(expert_capacity=2.0, grid=(8,))
    result = weft.search(step, "flexflow-p100x8", moves=40, fixed=fixed)
    # Over their number, or within each of them.
    assert result.best.parameters["layers.0.up"] in (weft.split(0), weft.split(1))
    assert any("experts split" in each.name for each in result.tried)
    for zero in (None, weft.Zero(1), weft.Zero(3)):
        said = replace(weft.data_parallel(), zero=zero)
        assert result.seconds < weft.simulate(step, said, "flexflow-p100x8").step_seconds


def test_what_is_fixed_of_them_stays() -> None:
    fixed = weft.Strategy(parameters={"*.up": weft.broadcast})
    found = begun(mixture(), "h100x4", base=fixed)
    assert found.facts.experts == Experts((), 0)
    assert not space_of(found.facts, every_rank=True).experts.any()
