"""Freed memory stays with the process, unless the user set the allocator up."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from types import SimpleNamespace

import pytest
import torch

from weft.runtime.memory.allocator import give_back, is_free_to_choose, keep_freed_memory
from weft.runtime.world import distributed
from weft.runtime.world.world import local_world


def test_the_users_settings_win():
    assert is_free_to_choose({"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.cpu.x86=1"})
    assert not is_free_to_choose({"MALLOC_ARENA_MAX": "4"})
    assert not is_free_to_choose({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"})
    assert not is_free_to_choose({"WEFT_MALLOC": "system"})


@pytest.mark.parametrize(("platform", "variable"), [("win32", ""), ("linux", "system")])
def test_nothing_is_given_back_where_it_is_not_weft_s(monkeypatch, platform, variable):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    called = []
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


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_large_results_of_all_ranks_reuse_their_pages():
    def allocate(rank):
        for _ in range(10):
            torch.ones(2**21)

    with local_world(2) as world:
        if not keep_freed_memory():
            pytest.skip("another C library, or an allocator that the user set up")
        world.run(allocate)
        before = faults()
        world.run(allocate)
    # Fresh memory would take 2 x 10 x 2048 pages.
    assert faults() - before < 10 * 2048


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
