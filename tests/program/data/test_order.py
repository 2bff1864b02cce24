"""The order of samples hangs on seed and epoch alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from program.data.datasets import SAMPLES, Drawn
from weft.errors import UserError
from weft.program.data.order import RUN, by_similar_lengths, drawn_by, mixed, order_of


def test_permutations() -> None:
    data = Drawn()
    first = order_of(data, None, True, 3, 0)
    torch.manual_seed(9)
    assert order_of(data, None, True, 3, 0) == first
    assert sorted(first) == list(range(SAMPLES))
    others = [order_of(data, None, True, seed, epoch) for seed, epoch in ((3, 1), (4, 0))]
    assert first not in others
    assert others[0] != others[1]
    assert order_of(data, None, False, 3, 1) == list(range(SAMPLES))


def test_seeds_are_the_same_on_all_machines() -> None:
    assert mixed(0) == 872845860
    assert mixed(1, 23) != mixed(12, 3)


@pytest.mark.parametrize("make", [RandomSampler, lambda data: DistributedSampler(data, 1, 0)])
def test_samplers_draw_by_seed_and_epoch(make) -> None:  # type: ignore[no-untyped-def]
    data = Drawn()
    sampler = make(data)
    first = order_of(data, sampler, False, 0, 0)
    torch.manual_seed(9)
    assert order_of(data, sampler, False, 0, 0) == first
    assert order_of(data, sampler, False, 0, 1) != first


def test_a_sampler_that_never_ends_is_told() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(SAMPLES))

    class Long(Endless):
        def __len__(self) -> int:
            return 2**20 + 1

        def __iter__(self) -> Iterator[int]:
            return itertools.islice(super().__iter__(), len(self))

    with pytest.raises(UserError, match="a Endless, has given 1048576 numbers and does not end"):
        order_of(Drawn(), Endless(), False, 0, 0)
    assert len(order_of(Drawn(), Long(), False, 0, 0)) == 2**20 + 1


def test_generators_go_on_where_they_were() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = (
        torch.rand(2).tolist(),
        np.random.rand(2).tolist(),
        [random.random() for _ in range(2)],
    )
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    found: tuple[list[float], list[float], list[float]] = [], [], []
    for _ in range(2):
        with drawn_by(7):
            torch.rand(3), np.random.rand(3), random.random()
        found[0].append(torch.rand(1).item())
        found[1].append(float(np.random.rand()))
        found[2].append(random.random())
    assert found == expected


def test_a_samplers_own_generator_is_seeded() -> None:
    sampler = WeightedRandomSampler([1.0] * 20, 20, generator=torch.Generator())
    first = order_of(None, sampler, False, 0, 3)
    order_of(None, sampler, False, 0, 4)
    assert order_of(None, sampler, False, 0, 3) == first


@pytest.mark.parametrize(
    ("sampler", "text"),
    [(iter([1, 2]), "can be iterated only once"), ([[1, 2]], r"gives \[1, 2\]")],
)
def test_samplers_that_cannot_be(sampler, text) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=text):
        order_of(None, sampler, False, 0, 0)


def test_a_dataset_without_length() -> None:
    with pytest.raises(UserError, match="has no length"):
        order_of(iter(()), None, False, 0, 0)


@pytest.mark.parametrize("seed", [None, 4])
def test_samples_of_a_batch_have_lengths_alike(seed: int | None) -> None:
    """All samples are there once; what is left for the last batch stays."""
    order = order_of(range(200), None, True, 1, 0)
    lengths = [(7 * number) % 50 for number in range(200)]
    found = by_similar_lengths(order, lengths, 6, seed)
    assert sorted(found) == list(range(200))
    assert found[198:] == order[198:]
    assert by_similar_lengths(order, lengths, 6, seed) == found

    def padding(samples: list[int]) -> int:
        batches = [samples[at : at + 6] for at in range(0, 198, 6)]
        return sum(6 * max(lengths[n] for n in x) - sum(lengths[n] for n in x) for x in batches)

    assert padding(found) < padding(order) / 5
    runs = [order[at : at + 6 * RUN] for at in range(0, 198, 6 * RUN)]
    if seed is None:
        assert [sorted(run) for run in runs[:1]] == [sorted(found[: 6 * RUN])]
