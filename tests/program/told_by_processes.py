"""Tests that are right in one process, and most of them wrong in several: `tests/test_processes.py` has them run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

import weft
from beside_plain import Both
from program.live_models import twins

RANK = "RANK"


@pytest.fixture
def world() -> Iterator[None]:
    with weft.local_world(2):
        yield


@pytest.mark.usefixtures("world")
def test_ranks_train_alike() -> None:
    both = Both(torch.nn.Linear(8, 8))
    both.step()


def test_worlds_of_several_sizes() -> None:
    for size in (1, 2, 3, 2):
        with weft.local_world(size) as world:
            assert world.size == size
            placement = weft.placement("cpu", range(size))
            x = weft.ones(6, placement=placement, sbp=weft.split(0))
            assert x.sum().item() == 6


@pytest.mark.usefixtures("world")
def test_one_rank_has_other_data() -> None:
    model = torch.nn.Linear(8, 8)
    if os.environ.get(RANK) == "1":
        model.weight.data += 1
    both = Both(model)
    both.step()


@pytest.mark.usefixtures("world")
def test_one_rank_fails() -> None:
    assert os.environ.get(RANK) != "1", "this is rank 1"


@pytest.mark.usefixtures("world")
def test_one_rank_dies() -> None:
    if os.environ.get(RANK) == "1":
        os._exit(3)
    Both(torch.nn.Linear(8, 8))


@pytest.mark.timeout(12)
@pytest.mark.usefixtures("world")
def test_one_rank_hangs() -> None:
    if os.environ.get(RANK) == "1":
        time.sleep(60)


def test_live_writes_that_run_whole() -> None:
    """By a function, whose address is another in each process."""
    with twins("zero 3") as both:
        both.both(lambda model, _: torch.nn.init.eye_(model.first.weight))
        both.check()


@pytest.mark.one_process_outside("a file is written")
def test_rank_0_goes_on_alone(tmp_path: object) -> None:
    with weft.local_world(2):
        pass
    assert RANK not in os.environ


@pytest.mark.one_process("it asks for threads")
def test_threads() -> None:
    with weft.local_world(2) as world:
        assert world.ranks == (0, 1)
