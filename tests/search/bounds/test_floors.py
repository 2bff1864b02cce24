"""Floors are below what plans take, and estimates tell far quicker points, also on slow links and two kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from search.jobs import begun, decoder, least_memory_of, least_of, loss
from weft.planning.stored_step import StoredStep
from weft.search.evaluation.measures import Measures
from weft.search.moves.groups import legal_signatures_of
from weft.search.space.fixed import space_of
from weft.search.space.point import Point
from weft.search.space.points import Points
from weft.search.state import SearchState

SLOW = """
weft_topology: 1
name: slow
source: made up
links:
  slow: {gb_per_second: 0.125, latency_microseconds: 50}
nodes:
  - count: 4
    devices: {kind: k80, count: 1}
    ports:
      - {link: slow, count: 1}
network:
  - {name: switch, latency_microseconds: 1}
"""
TWO_KINDS = """
weft_topology: 1
name: two kinds
source: made up
nodes:
  - count: 2
    devices: {kind: a100-sxm-40gb, count: 1}
    ports:
      - {link: infiniband-hdr, count: 1}
  - count: 2
    devices: {kind: v100-sxm2-16gb, count: 1}
    ports:
      - {link: infiniband-edr, count: 1}
network:
  - {name: switch, latency_microseconds: 1}
"""


def job(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> StoredStep:
    batch = {"x": torch.zeros(shape, dtype=dtype), "y": torch.zeros(shape[0], dtype=torch.int64)}
    return weft.Job(model, loss, torch.optim.AdamW(model.parameters()), batch).stored()


def layers(*widths: int) -> nn.Sequential:
    found: list[nn.Module] = []
    for one, other in pairwise(widths):
        found += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*found[:-1])


def many_classes() -> StoredStep:
    return job(layers(16, 64, 16, 20_000), 4, 16)


def few_samples() -> StoredStep:
    """Gradients larger than what is around them."""
    return job(layers(512, 512, 512, 512, 10), 4, 512)


def many_samples() -> StoredStep:
    """Weights smaller than what they make."""
    return job(layers(32, 32, 32, 32, 10), 2048, 32)


def narrow() -> StoredStep:
    return job(layers(256, 256, 256, 10).bfloat16(), 16, 256, dtype=torch.bfloat16)


def convolutions() -> StoredStep:
    first = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
    return job(
        nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)), 8, 3, 16, 16
    )


@pytest.mark.parametrize(
    "step",
    [many_classes, few_samples, many_samples, narrow, convolutions],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("topology", [SLOW, TWO_KINDS], ids=["slow", "two kinds"])
def test_floors_are_below_steps(
    tmp_path: Path, topology: str, step: Callable[[], StoredStep]
) -> None:
    (tmp_path / "t.yaml").write_text(topology)
    found = begun(step(), str(tmp_path / "t.yaml"))
    space = space_of(found.facts, every_rank=False)
    few = np.flatnonzero(space.micro_batches <= 4).tolist()
    for point in map(space.point, random.Random(0).sample(few, 4)):
        answer = found.evaluator.of(found.strategy(point))
        assert isinstance(answer, Measures), f"{point}: {answer}"
        assert least_of(found.floors, point) <= answer.seconds, str(point)
        assert least_memory_of(found.floors, point) <= answer.memory, str(point)


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
def test_floors_hold_for_zero_by_patterns(
    tmp_path: Path, zero: Any, step: Callable[[], StoredStep]
) -> None:
    """Of the quickest points by floor, the nearest to it, and of drawn ones."""
    (tmp_path / "t.yaml").write_text(SLOW)
    found = begun(step(), str(tmp_path / "t.yaml"), base=weft.Strategy(zero=zero))
    space = space_of(found.facts, every_rank=False)
    few = np.flatnonzero(space.micro_batches <= 2).tolist()
    quick = sorted(few, key=lambda number: found.floors.least(space)[number])[:2]
    for point in map(space.point, [*quick, *random.Random(0).sample(few, 3)]):
        strategy = found.strategy(point)
        assert strategy.zero == zero
        answer = found.evaluator.of(strategy)
        assert isinstance(answer, Measures), f"{point}: {answer}"
        assert least_of(found.floors, point) <= answer.seconds, str(point)
        assert least_memory_of(found.floors, point) <= answer.memory, str(point)


@pytest.mark.parametrize(
    ("step", "pattern"), [(many_classes, "4.*"), (few_samples, "*")], ids=["classes", "all"]
)
def test_floors_hold_for_parameters_that_are_split(
    tmp_path: Path, step: Callable[[], StoredStep], pattern: str
) -> None:
    """Their gradients need not be added up, nor have room whole: classes by hand, in data parallel too."""
    (tmp_path / "t.yaml").write_text(SLOW)
    fixed = weft.Strategy(parameters={pattern: weft.split(0)})
    _check_floors(begun(step(), str(tmp_path / "t.yaml"), base=fixed), Point(4), Point(4, zero=1))


def test_floors_hold_for_signatures_that_are_fixed(tmp_path: Path) -> None:
    """Each rank does all of the work: nothing is exchanged."""
    (tmp_path / "t.yaml").write_text(SLOW)
    step = job(layers(512, 512, 512, 512, 10), 64, 512)
    whole = {
        name: str(signature)
        for name, legal in legal_signatures_of(step.graph, 4).items()
        for signature in legal
        if all(sbp == weft.broadcast for sbp in (*signature.operands, *signature.results))
    }
    fixed = weft.Strategy(batch={"*": weft.broadcast}, signatures=whole)
    _check_floors(begun(step, str(tmp_path / "t.yaml"), base=fixed), Point(4))


def _check_floors(found: SearchState, *points: Point) -> None:
    for point in points:
        answer = found.evaluator.of(found.strategy(point))
        assert isinstance(answer, Measures), f"{point}: {answer}"
        assert least_of(found.floors, point) <= answer.seconds, str(point)
        assert least_memory_of(found.floors, point) <= answer.memory, str(point)


def test_gradients_and_sums_decide_where_links_are_slow(tmp_path: Path) -> None:
    """Of a model without numbered blocks: large weights and few samples are for a Megatron grid."""
    (tmp_path / "t.yaml").write_text(SLOW)
    few = begun(few_samples(), str(tmp_path / "t.yaml")).estimates
    grid, plain = Point(1, 4, layouts="columns"), Point(4)
    assert few.rough_of(plain) > 10 * few.rough_of(grid)
    many = begun(many_samples(), str(tmp_path / "t.yaml")).estimates
    assert many.rough_of(plain) < many.rough_of(grid)


def test_exchanges_of_each_micro_batch_decide_where_links_are_slow(tmp_path: Path) -> None:
    """Split gradients are reduced, and split parameters gathered, in each of them."""
    file = tmp_path / "slow.yaml"
    file.write_text(SLOW)
    found = begun(job(layers(512, 512, 512, 512, 10), 64, 512), str(file))
    levels = [Point(4, zero=zero, micro_batches=8) for zero in range(4)]
    whole, _, split, gathered = (_took(found, point) for point in levels)
    assert 3 * whole < split < gathered
    for point in levels:
        assert 0.5 < found.estimates.rough_of(point) / _took(found, point) < 2, str(point)


def _took(found: SearchState, point: Point) -> float:
    answer = found.evaluator.of(found.strategy(point))
    assert isinstance(answer, Measures), str(point)
    return answer.seconds


def test_blocks_that_run_again_take_what_all_their_calls_take() -> None:
    """Products alone are the floor; what is between them is a large part of a decoder."""
    found = begun(decoder(8), "h100x2")
    kept, again = (Point(2, recompute=count) for count in (0, 8))
    floors, work = found.floors, found.floors.work
    least, about = (
        [float(work.busy(Points.one(point), least=each)[0]) for point in (kept, again)]
        for each in (True, False)
    )
    assert 0 < least[1] - least[0] < about[1] - about[0]
    assert least_of(floors, again) <= _took(found, again)
