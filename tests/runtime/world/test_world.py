"""Worlds: placements, the current world, and running on all ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import Any

import pytest
import torch

from weft.errors import LayoutError, RankFailure, UserError
from weft.layout import placement
from weft.runtime.world.distributed import _device, current_world
from weft.runtime.world.world import LocalWorld, local_world

pytestmark = pytest.mark.timeout(30)


def test_run_calls_every_rank_in_a_thread_of_its_own():
    meeting = threading.Barrier(3)

    def work(rank):
        meeting.wait(10)  # passes only when all three run at once
        return rank, threading.get_ident()

    with local_world(3) as world:
        first, second = world.run(work), world.run(work)
    assert [rank for rank, _ in first] == [0, 1, 2]
    assert len({thread for _, thread in first}) == 3
    assert first == second  # the threads last
    assert first[0][1] == threading.get_ident()


def test_the_error_of_the_rank_that_failed_is_raised():
    def work(rank):
        if rank == 1:
            raise ValueError("rank 1 it was")

    with local_world(2) as world:
        with pytest.raises(ValueError, match="rank 1 it was"):
            world.run(work)
        assert world.run(lambda rank: rank) == [0, 1]


@pytest.mark.thorough  # a few bytecodes lie outside of what catches an interrupt
def test_an_interrupt_does_not_leave_ranks_behind():
    """Ctrl-C while the first rank has ended, and waits for the other one."""
    main = threading.main_thread().ident
    ended: list[Any] = []

    def work(rank):
        if rank == 1:
            while not {"join_call", "wait"} <= {*names(sys._current_frames()[main])}:
                pass
            os.kill(os.getpid(), signal.SIGINT)
            while "join_call" in names(sys._current_frames()[main]) and not told:
                pass
            ended.append(rank)

    def names(frame):
        return [each.name for each in traceback.extract_stack(frame)]

    def handle(number, frame):
        told.append(number)
        raise KeyboardInterrupt

    told = []
    before = signal.signal(signal.SIGINT, handle)
    try:
        with local_world(2) as world:
            for count in (1, 2):
                with pytest.raises(KeyboardInterrupt):
                    world.run(work)
                assert ended == [1] * count
            assert world.run(lambda rank: rank) == [0, 1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_placement_must_fit_the_world():
    with local_world(2) as world:
        world.check(placement("cpu", [1, 0]))
        with pytest.raises(
            LayoutError, match=r"names ranks \[2, 3\], .* has 2 \(0 to 1\); .* weft run -n 4, or"
        ):
            world.check(placement("cpu", [[0, 1], [2, 3]]))
        with pytest.raises(LayoutError, match="is on cuda, but this world runs on cpu"):
            world.check(placement("cuda", [0]))


def test_the_current_world_is_the_innermost_local_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with local_world(2) as outer:
        assert current_world() is outer
        with local_world(3) as inner:
            assert current_world() is inner
        assert current_world() is outer
    alone = current_world()
    assert isinstance(alone, LocalWorld)
    assert alone.size == 1
    assert current_world() is alone
    assert alone.device(0) == torch.device("cpu")


def test_ranks_with_different_plans_are_told():
    with local_world(3) as world:
        world.check_same({0: "a", 1: "a", 2: "a"}, "the plan")
        with pytest.raises(RankFailure, match=r"ranks \[1\]"):
            world.check_same({0: "a", 1: "b", 2: "a"}, "the plan")


def test_worlds_that_cannot_be():
    with pytest.raises(UserError, match="at least one rank"):
        LocalWorld(0)
    with pytest.raises(UserError, match="tpu"):
        current_world("tpu")


def test_cuda_devices_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="cuda:0, but sees 0 CUDA devices"):
        LocalWorld(2, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="cuda:2, but sees 2 CUDA devices"):
        _device("cuda")
