"""Every system of a comparison runs with the same settings of the allocator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import malloc
from benchmarks.compare import Bench
from benchmarks.crew import SystemFailure
from benchmarks.systems.system import Job, System
from benchmarks.works.table import TINY

ROOT = Path(__file__).parents[2]
# A peer that takes 32 MiB in each step, which glibc by default gets from the system anew; its losses are the fresh
# pages of a step. In a process of its own: one that has computed before has a heap of another form.
PAGES = 2**13
PEER = """
import resource, torch
from benchmarks.compare import Bench
from benchmarks.systems.system import Job, System
from benchmarks.works.table import TINY

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def peer(job):
    def step():
        before = faults()
        torch.ones(2**23)
        return float(faults() - before)
    return System(step)

job = Job("mlp_small", TINY["mlp_small"], "single")
for malloc in ("kept", "default"):
    with Bench(timeout=60, malloc=malloc).crew(peer, job) as crew:
        crew.ready()
        print(min(crew.turn(20).losses))  # the first few lie where others have lain
"""


@pytest.mark.thorough
def test_a_peer_has_the_allocator_that_is_asked_for() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PEER],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/src"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    kept, default = map(float, result.stdout.split())
    assert kept < PAGES / 16
    assert default >= PAGES / 16  # huge pages count once


def idle(_: Job) -> System:
    return System(lambda: 0.0)


def test_where_it_cannot_be_set_up_no_system_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    monkeypatch.setattr(malloc, "keep_freed_memory", lambda: False)  # it is asked once in a process
    job = Job("mlp_small", TINY["mlp_small"], "single")
    with Bench(timeout=60).crew(idle, job) as crew, pytest.raises(SystemFailure, match="ARENA_MAX"):
        crew.ready()


def test_weft_leaves_the_default_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc, "keep_freed_memory", lambda: pytest.fail("it was set up"))

    def enter(rank: int) -> Mapping[str, str]:
        return {"RANK_WAS": str(rank)}

    found = malloc.with_malloc("default", enter)(3)
    assert found == {"RANK_WAS": "3", "WEFT_MALLOC": "system"}
