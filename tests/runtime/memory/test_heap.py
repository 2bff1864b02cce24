"""Freed memory stays with the process, and tensors that stay move out of its midst, unless the user set it up."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from weft.runtime.memory import heap
from weft.runtime.memory.heap import (
    defragment,
    give_back,
    is_free_to_choose,
    keep_freed_memory,
)
from weft.runtime.world import distributed

MIB = 2**20
OURS = pytest.mark.skipif(
    sys.platform != "linux" or not keep_freed_memory(), reason="the allocator is not weft's"
)


def test_the_users_settings_win():
    assert is_free_to_choose({"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.cpu.x86=1"})
    assert not is_free_to_choose({"MALLOC_ARENA_MAX": "4"})
    assert not is_free_to_choose({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"})
    assert not is_free_to_choose({"WEFT_MALLOC": "system"})


@pytest.mark.parametrize(("platform", "variable"), [("win32", ""), ("linux", "system")])
def test_nothing_is_given_back_where_it_is_not_weft_s(monkeypatch, platform, variable):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    called: list[int] = []
    library = SimpleNamespace(malloc_trim=called.append)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("WEFT_MALLOC", "")
    give_back()
    assert called == [0]
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("WEFT_MALLOC", variable)
    give_back()
    assert called == [0]


# Of a process of its own: heaps of threads that have ended go to later ones.
REUSED = """
import resource, sys, torch
from weft.runtime.memory.heap import keep_freed_memory
from weft.runtime.world.world import local_world

def allocate(rank):
    for _ in range(10):
        torch.ones(2**21)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with local_world(2) as world:
    if keep_freed_memory():
        world.run(allocate)
        before = faults()
        world.run(allocate)
        # Fresh memory would take 2 x 10 x 2048 pages.
        assert faults() - before < 10 * 2048
"""


def test_large_results_of_all_ranks_reuse_their_pages():
    subprocess.run([sys.executable, "-c", REUSED], check=True, timeout=120)


def test_memory_is_set_up_before_there_are_threads(monkeypatch):
    """Heaps of threads that have ended go to later ones, whatever is set by then."""
    done = []

    def join(*_):
        done.append("join")
        raise ConnectionError

    monkeypatch.setattr(distributed, "keep_freed_memory", lambda: done.append("memory"))
    monkeypatch.setattr(distributed, "join", join)
    with pytest.raises(ConnectionError):
        distributed.DistributedWorld("cpu")
    assert done == ["memory", "join"]


@OURS
def test_tensors_stay_the_same_objects():
    tensors = [torch.arange(MIB, dtype=torch.int32), torch.randn(3, MIB, dtype=torch.float64)]
    tensors.append(torch.randn(1000, 1000).t())
    views = [each[0] for each in tensors]
    before = [each.clone() for each in tensors]
    storages = [each.untyped_storage().data_ptr() for each in tensors]
    assert defragment([*tensors, tensors[0]], 2**30) == sum(each.nbytes for each in tensors)
    for tensor, view, value in zip(tensors, views, before, strict=True):
        torch.testing.assert_close(tensor, value, rtol=0, atol=0)
        assert tensor.stride() == value.stride() or tensor.is_contiguous() != value.is_contiguous()
        tensor.zero_()
        assert not view.any()  # it sees the memory of its tensor
    assert len(storages) == len({each.data_ptr() for each in tensors})


@OURS
def test_all_memory_goes_before_any_is_taken_anew(monkeypatch):
    """So what lay between them is one piece when they come back."""
    tensors = [torch.ones(MIB) for _ in range(4)]
    events = []

    class Noted:
        """A storage whose changes of size are noted."""

        def __init__(self, storage):
            self.nbytes, self.data_ptr, self.copy_ = storage.nbytes, storage.data_ptr, storage.copy_
            self._storage = storage

        def resize_(self, size):
            events.append((size, self._storage.data_ptr()))
            self._storage.resize_(size)

    places = [each.data_ptr() for each in tensors]
    monkeypatch.setattr(heap, "_outside", lambda noted: noted._storage.clone())
    assert heap._move([Noted(each.untyped_storage()) for each in tensors]) == 16 * MIB
    assert [size for size, _ in events] == [0] * 4 + [4 * MIB] * 4
    assert [place for _, place in events[:4]] == places
    assert all(bool(each.all()) for each in tensors)


@OURS
def test_copies_take_no_more_than_there_is_room(monkeypatch):
    taken = []

    def move(portion):
        taken.append([each.nbytes() for each in portion])
        return sum(taken[-1])

    monkeypatch.setattr(heap, "_move", move)
    large, *small = (torch.ones(size * MIB, dtype=torch.uint8) for size in (5, 2, 2, 2))
    assert defragment([large, *small], 4 * MIB) == 6 * MIB
    assert sorted(map(sum, taken)) == [2 * MIB, 4 * MIB]
    taken.clear()
    assert defragment([large], 4 * MIB) == 0
    assert defragment([large, *small], 2**30) == 11 * MIB
    assert len(taken) == 1


@OURS
def test_the_highest_go_first(monkeypatch):
    found = []
    monkeypatch.setattr(heap, "_move", lambda portion: found.extend(portion) or 1)
    tensors = [torch.ones(MIB) for _ in range(4)]
    defragment(tensors, 2**30)
    places = [each.data_ptr() for each in found]
    assert places == sorted((each.data_ptr() for each in tensors), reverse=True)


@OURS
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2 * MIB)[MIB:],
        lambda: torch.from_numpy(np.ones(2 * MIB)),
        lambda: torch.ones(2 * MIB).share_memory_(),
        lambda: torch.ones(MIB // 4 - 1),  # less than it is worth
        lambda: torch.ones(2 * MIB, device="meta"),
    ],
    ids=["view", "numpy", "shared", "small", "meta"],
)
def test_what_has_no_memory_of_its_own_stays(make):
    tensor = make()
    place = tensor.data_ptr()
    assert defragment([tensor], 2**30) == 0
    assert tensor.data_ptr() == place


@OURS
def test_nothing_moves_where_the_allocator_is_the_user_s(monkeypatch):
    monkeypatch.setattr(heap, "keep_freed_memory", lambda: False)
    assert defragment([torch.ones(MIB)], 2**30) == 0


@OURS
def test_tensors_stay_where_there_is_no_memory_for_copies(monkeypatch):
    def full(*arguments):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    tensor = torch.ones(MIB)
    place = tensor.data_ptr()
    assert defragment([tensor], 2**30) == 0
    assert tensor.data_ptr() == place
    assert tensor.all()
