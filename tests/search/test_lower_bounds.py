"""Lower bounds are below what plans take, also on slow links and two kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import weft
from search.jobs import (
    begun,
    decoder,
    dense,
    few_samples,
    least_memory_of,
    least_of,
    loss,
    many_samples,
    planned,
    step_of,
)
from search.machines import SLOW, TWO_KINDS
from weft.hardware.topology import Topology
from weft.planning.stored_step import StoredStep
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.moves.layouts import legal_signatures_of
from weft.search.space import space_of
from weft.search.state import SearchState


def many_classes() -> StoredStep:
    return step_of(dense(16, 64, 16, 20_000), 4, 16)


def narrow() -> StoredStep:
    return step_of(dense(256, 256, 256, 10).bfloat16(), 16, 256, dtype=torch.bfloat16)


def convolutions() -> StoredStep:
    first = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
    return step_of(
        nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)), 8, 3, 16, 16
    )


@pytest.mark.parametrize(
    "step",
    [many_classes, few_samples, many_samples, narrow, convolutions],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("topology", [SLOW, TWO_KINDS], ids=["slow", "two kinds"])
def test_floors_are_below_steps(topology: Topology, step: Callable[[], StoredStep]) -> None:
    found = begun(step(), topology)
    space = space_of(found.facts, every_rank=False)
    few = np.flatnonzero(space.micro_batches <= 4).tolist()
    for candidate in map(space.candidate, random.Random(0).sample(few, 4)):
        _check(found, candidate)


class Towers(nn.Module):
    """Two stacks of layers side by side: a stage of the second waits for none of the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = (dense(*[width] * 5) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.one(x) + self.other(x))
        return made


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("stages", [2, 4])
def test_floors_of_stages_hold_where_parts_are_side_by_side(schedule: str, stages: int) -> None:
    with torch.device("meta"):
        step = step_of(Towers(2048), 2048, 2048)
    found = begun(step, "flexflow-k80x4")
    for micro_batches in (1, 2, 8):
        _check(found, Candidate(1, stages=stages, micro_batches=micro_batches, schedule=schedule))


def fine_tuned() -> StoredStep:
    """Only the last layer is trained."""
    model = dense(512, 512, 512, 512, 10)
    for each in model[:-1].parameters():
        each.requires_grad_(False)
    batch = {"x": torch.zeros(64, 512), "y": torch.zeros(64, dtype=torch.int64)}
    return weft.Job(model, loss, torch.optim.AdamW(model[-1].parameters()), batch).stored()


class Pooled(nn.Module):
    """Layers in turn, of whose sum the mean over positions is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = dense(512, 2048, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(torch.relu(self.layers(x).mean(1)))
        return made


def pooled() -> StoredStep:
    with torch.device("meta"):
        return step_of(Pooled(), 8, 256, 512)


class Behind(nn.Module):
    """Layers cut by columns and rows behind something, of whose sum the mean over positions is read."""

    def __init__(self, first: nn.Module, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.layers, self.head = first, dense(512, 2048, 512), nn.Linear(512, 10)
        self.layers.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(torch.relu(self.layers(self.first(x))).mean(1))
        return made


def behind(first: nn.Module, frozen: bool = False) -> StoredStep:
    model, words = Behind(first, frozen), isinstance(first, nn.Embedding)
    x = torch.zeros(64, 16, dtype=torch.int64) if words else torch.zeros(64, 16, 512)
    batch = {"x": x, "y": torch.zeros(64, dtype=torch.int64)}
    trained = [each for each in model.parameters() if each.requires_grad]
    return weft.Job(model, loss, torch.optim.AdamW(trained), batch).stored()


def behind_a_norm() -> StoredStep:
    return behind(nn.LayerNorm(512))


def behind_few_words() -> StoredStep:
    return behind(nn.Embedding(4, 512))


def frozen() -> StoredStep:
    return behind(nn.Identity(), frozen=True)


def behind_a_layer() -> StoredStep:
    return behind(nn.Linear(512, 512))


@pytest.mark.parametrize(
    "step",
    [fine_tuned, pooled, behind_a_norm, behind_few_words, frozen, behind_a_layer],
    ids=lambda f: f.__name__,
)
def test_floors_hold_where_less_is_exchanged(step: Callable[[], StoredStep]) -> None:
    found = begun(step(), SLOW)
    for candidate in (
        *(Candidate(4), Candidate(4, zero=1), Candidate(2, stages=2, micro_batches=2)),
        *(Candidate(1, 4, layouts="columns"), Candidate(2, 2, layouts="columns")),
    ):
        _check(found, candidate)


@pytest.mark.parametrize("step", [few_samples, many_samples], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "zero",
    [
        {"0.*": None, "*": weft.Zero(3)},
        {"2.weight": weft.Zero(2), "*": weft.Zero(1)},
        {"0.weight": weft.Zero(1)},
        {"*.bias": None},
    ],
    ids=str,
)
def test_floors_hold_for_zero_by_patterns(zero: Any, step: Callable[[], StoredStep]) -> None:
    """Of the quickest candidates by lower bound, the nearest to it, and of drawn ones."""
    found = begun(step(), SLOW, base=weft.Strategy(zero=zero))
    space = space_of(found.facts, every_rank=False)
    few = np.flatnonzero(space.micro_batches <= 2).tolist()
    quick = sorted(few, key=lambda number: found.lower_bounds.least(space)[number])[:2]
    for candidate in map(space.candidate, [*quick, *random.Random(0).sample(few, 3)]):
        assert found.strategy(candidate).zero == zero
        _check(found, candidate)


@pytest.mark.parametrize(
    ("step", "pattern"), [(many_classes, "4.*"), (few_samples, "*")], ids=["classes", "all"]
)
def test_floors_hold_for_parameters_that_are_split(
    step: Callable[[], StoredStep], pattern: str
) -> None:
    """Their gradients need not be added up, nor have room whole: classes by hand, in data parallel too."""
    fixed = weft.Strategy(parameters={pattern: weft.split(0)})
    found = begun(step(), SLOW, base=fixed)
    for candidate in (Candidate(4), Candidate(4, zero=1)):
        _check(found, candidate)


def test_floors_hold_for_signatures_that_are_fixed() -> None:
    """Each rank does all of the work: nothing is exchanged."""
    step = step_of(dense(512, 512, 512, 512, 10), 64, 512)
    whole = {
        name: str(signature)
        for name, legal in legal_signatures_of(step.graph, 4).items()
        for signature in legal
        if all(sbp == weft.broadcast for sbp in (*signature.operands, *signature.results))
    }
    fixed = weft.Strategy(batch={"*": weft.broadcast}, signatures=whole)
    _check(begun(step, SLOW, base=fixed), Candidate(4))


def _check(found: SearchState, candidate: Candidate) -> None:
    measures = planned(found, candidate)
    assert least_of(found.lower_bounds, candidate) <= measures.seconds, str(candidate)
    assert least_memory_of(found.lower_bounds, candidate) <= measures.memory, str(candidate)


def test_blocks_that_run_again_take_what_all_their_calls_take() -> None:
    """Products alone are the lower bound; what is between them is a large part of a decoder."""
    found = begun(decoder(8), "h100x2")
    kept, again = (Candidate(2, recompute=count) for count in (0, 8))
    lower_bounds, work = found.lower_bounds, found.lower_bounds.work
    least, about = (
        [
            float(work.busy(CandidateTable.of([candidate]), least=each)[0])
            for candidate in (kept, again)
        ]
        for each in (True, False)
    )
    assert 0 < least[1] - least[0] < about[1] - about[0]
    assert least_of(lower_bounds, again) <= planned(found, again).seconds
