"""The harness: rows of systems that run, and of those that fail or train something else."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from mmap import PAGESIZE, mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.crew import SystemFailure, Turn
from benchmarks.load import Load
from benchmarks.memory import peak_bytes, peak_resident_bytes
from benchmarks.references import check
from benchmarks.rounds import Rounds, Side, over, settled, take_turns, worth_the_time
from benchmarks.rows import Found, interval, rows
from benchmarks.systems import limits, plain
from benchmarks.systems.system import Job
from benchmarks.systems.table import SYSTEMS, Entry
from benchmarks.works.table import TINY, WORKS

ROOT = Path(__file__).parents[2]

ODD = """
import json, os, sys, time
from dataclasses import replace
from functools import partial
import torch
from benchmarks.compare import Bench, compare
from benchmarks.crew import Crew, SystemFailure
from benchmarks.systems import plain
from benchmarks.systems.system import Job
from benchmarks.systems.table import Entry
from benchmarks.works.table import TINY

def faster(job):
    optimizer = partial(torch.optim.AdamW, lr=1.1e-3)
    return plain.eager(replace(job, work=replace(job.work, optimizer=optimizer)))

def broken(job):
    raise ValueError("not this one")

def crashing(job):
    os.abort()

def hanging(job):
    time.sleep(100)

job = Job("mlp_small", TINY["mlp_small"], "single")
entries = [Entry(f.__name__, f, "peer") for f in (plain.eager, faster, broken, crashing)]
rows = compare(job, entries, "host", Bench(rounds=2)).rows
try:
    with Crew(hanging, job, timeout=1) as crew:
        crew.ready()
except SystemFailure as failure:
    rows.append({"system": "hanging", "error": str(failure)})
json.dump(rows, open(sys.argv[1], "w"))
"""


def run(folder: Path, *command: str) -> list[dict[str, Any]]:
    """The rows that a process writes."""
    out = folder / "rows.json"
    result = subprocess.run(
        [sys.executable, *command, str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stdout
    found = json.loads(out.read_text())
    return list(found["rows"] if isinstance(found, dict) else found)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_pair_has_a_row_for_each_system(tmp_path: Path) -> None:
    pair = (
        "--work",
        "resnet50",
        "--strategy",
        "data_parallel",
        "--systems",
        *("limit", "ddp", "ddp synced", "weft"),
    )
    found = run(tmp_path, "-m", "benchmarks.compare", *pair, "--tiny", "--rounds", "2", "--out")
    limit, ddp, synced, weft = found
    assert [row["system"] for row in found] == ["limit", "ddp", "ddp synced", "weft"]
    for row in found:
        assert (row["work"], row["strategy"], row["link"]) == ("resnet50", "data_parallel", "host")
        assert (row["ranks"], row["malloc"]) == (2, "kept")
        assert row["rounds"] == len(row["raw"]) == 2
        assert 0 < row["spread"][0] <= row["seconds"] <= row["spread"][1]
        assert row["compile_seconds"] > 0
        assert row["resident_bytes"] > row["peak_bytes"] > 10_000
    # BatchNorm: ranks of DDP have statistics of their own, weft those of the whole batch; so they have when synced.
    assert ddp["losses_agree"] < 1e-3
    assert synced["losses_agree"] < 1e-6
    assert weft["losses_agree"] < 1e-3
    assert (limit["losses_agree"], limit["ratio_to_limit"], ddp["ratio_to_best_peer"]) == (
        None,
    ) * 3
    assert weft["ratio_to_limit"] > 1
    assert weft["best_peer"] in weft["against"].keys() == {"ddp", "ddp synced"}
    low, high = weft["ratio_spread"]
    assert 0 < low <= weft["ratio_to_best_peer"] <= high
    assert weft["warm_compile_seconds"] > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_a_system_that_fails_or_trains_otherwise_has_a_row_that_says_so(tmp_path: Path) -> None:
    right, *wrong = run(tmp_path, "-c", ODD)
    assert right["system"] == "eager"
    assert right["losses_agree"] == 0
    errors = {row["system"]: row["error"] for row in wrong}
    assert "its losses are" in errors["faster"]
    assert errors["broken"] == "rank 0: ValueError: not this one"
    assert errors["crashing"] == "rank 0 ended with exit code -6"
    assert errors["hanging"] == "no answer within 1 s"


def found(kind: Any, name: str, *seconds: float) -> Found:
    return Found(Entry(name, lambda job: None, kind), seconds, 1.0, None, 100, 100, None, 0.0)  # type: ignore[arg-type,return-value]


def test_ratios_are_those_of_the_same_round() -> None:
    limit = found("limit", "limit", 1.0, 2.0, 4.0)
    slow, fast = found("peer", "slow", 9.0, 9.0, 9.0), found("peer", "fast", 2.0, 3.0, 8.0)
    own = found("own", "weft", 2.0, 2.0, 4.0)
    lower = found("limit", "limit weft", 0.5, 1.0, 2.0)
    assert rows({}, [limit, lower, own], {})[2]["ratio_to_limit"] == 2.0
    assert rows({}, [limit, lower, own], {})[2]["limit"] == "limit weft"
    lines = rows(
        {"work": "mlp", "strategy": "zero3", "link": "1gbit"},
        [limit, slow, fast, own],
        {"odd": "why"},
    )
    assert lines[3]["best_peer"] == "fast"
    assert lines[3]["ratio_to_best_peer"] == 1.5
    assert {name: each["ratio"] for name, each in lines[3]["against"].items()} == {
        "slow": 4.5,
        "fast": 1.5,
    }
    assert lines[3]["ratio_to_limit"] == 1.0
    assert lines[1]["ratio_to_best_peer"] is None
    assert lines[4] == {
        "work": "mlp",
        "strategy": "zero3",
        "link": "1gbit",
        "system": "odd",
        "error": "why",
    }


def side(kind: Any, name: str, *seconds: float) -> Side:
    entry = Entry(name, lambda job: None, kind)  # type: ignore[arg-type,return-value]
    return Side(entry, None, 1.0, None, 100, 100, None, 1.0, list(seconds))  # type: ignore[arg-type]


def test_who_is_beaten_in_the_quiet_rounds_is_not_timed_any_longer() -> None:
    quiet, noise, luck = range(7, 13), [50.0] * 7, [0.1] * 7  # the first rounds were disturbed
    own = side("own", "weft", *noise, *[9.0] * 6)
    fast, near = side("peer", "fast", *noise, *[1.0] * 6), side("peer", "near", *luck, *[1.3] * 6)
    slow = side("peer", "slow", *luck, *[1.4] * 6)
    low, high = side("limit", "limit", *noise, *[1.0] * 6), side("limit", "high", *luck, *[1.4] * 6)
    every = [own, low, high, fast, near, slow]
    assert worth_the_time(every, quiet) == [own, low, fast, near]
    assert worth_the_time(every, quiet[1:]) == every


def test_rounds_end_when_the_ratios_to_the_best_peer_and_the_limit_are_known() -> None:
    own, limit = side("own", "weft", *[1.0] * 6), side("limit", "limit", *[1.0] * 6)
    other = side("own", "weft auto", *[1.5] * 6)
    steady = side("peer", "steady", 2.0, 2.01, 2.02, 2.0, 2.01, 2.0)
    restless = side("peer", "restless", 1.0, 1.5, 2.0, 1.5, 1.0, 1.5)
    assert settled([own, other, limit, steady])
    assert not settled([own, other, limit, steady, restless])
    assert settled([own])
    assert not settled([own, steady], range(5))  # too few for an interval


def test_rounds_that_others_disturb_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, idle = Load(0.5, 0.0, 2.0), Load(0.0, 0.0, 1.0)

    def turns(*loads: Load, rounds: int | None = None) -> Rounds:
        left = list(loads)
        watch = SimpleNamespace(load=lambda: left.pop(0))
        monkeypatch.setattr("benchmarks.rounds.Watch", lambda processes: watch)
        crew: Any = SimpleNamespace(processes=[], turn=lambda steps: Turn(1.0, (), 0.0))
        one = Side(Entry("weft", plain.eager, "own"), crew, 1.0, None, 1, 1, None, 1.0)
        found = take_turns([one], rounds, 6, 60.0)
        assert len(one.seconds) == len(found.loads) == len(loads) - len(left)
        return found

    quiet = turns(busy, *[idle] * 5, busy, idle, idle)
    assert (quiet.counted, quiet.disturbed) == ([1, 2, 3, 4, 5, 7], 0)
    loud = turns(busy, idle, busy, rounds=3)
    assert (loud.counted, loud.disturbed) == ([0, 1, 2], 2)
    restless = Rounds([busy] * 7, 6, {})
    assert not over([], restless, used=2.9)
    assert over([], restless, used=3.1)


def test_medians_have_intervals_by_order() -> None:
    values = [3.0, 1.0, 2.0, 6.0, 5.0, 4.0]
    assert interval(values) == [1.0, 6.0]
    assert interval(values[:5]) is None  # in 1 of 16 cases all five lie to one side
    # Of 25 values, the 8th from both ends: the sign test's table at 5 % says 7.
    assert interval([float(each) for each in range(25)]) == [7.0, 17.0]


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    torch.manual_seed(0)
    draws = torch.rand(2000, 15).log().neg()
    found = [interval(row) for row in draws.tolist()]
    held = sum(each is not None and each[0] <= math.log(2) <= each[1] for each in found)
    assert 0.95 <= held / len(found) < 0.98


def test_a_peer_left_out_is_compared_by_the_rounds_that_it_ran() -> None:
    limit = found("limit", "limit", 1.0, 1.0, 1.0, 8.0, 8.0)
    slow = found("peer", "slow", 4.0, 4.0, 4.0)
    assert rows({}, [limit, slow], {})[1]["ratio_to_limit"] == 4.0


def test_losses_are_judged_by_how_far_the_reference_went() -> None:
    assert check([5.0, 4.0], [5.0, 4.004]) == pytest.approx(1e-3, rel=0.01)
    with pytest.raises(SystemFailure, match=r"its losses are \[5.0, 4.02\]"):
        check([5.0, 4.02], [5.0, 4.0])
    with pytest.raises(SystemFailure):
        check([5.0, math.nan], [5.0, 4.0])


def test_peak_memory_is_that_of_what_lives_and_what_a_step_takes() -> None:
    before = peak_bytes(lambda: None)
    kept = torch.zeros(1000)
    also = kept.view(10, 100)
    assert peak_bytes(lambda: None) - before == 1000 * 4
    assert peak_bytes(lambda: torch.zeros(500) + torch.zeros(500)) - before == 2500 * 4
    del kept, also


def test_resident_memory_is_that_at_the_peak_of_a_step_not_of_steps_before() -> None:
    size = 64 * 2**20

    def mapped() -> None:  # an allocator might keep what it was given back
        with mmap(-1, size) as memory:
            for page in range(0, size, PAGESIZE):
                memory[page] = 1

    mapped()
    before = peak_resident_bytes(lambda: None)
    assert peak_resident_bytes(mapped) - before > 0.9 * size
    assert peak_resident_bytes(lambda: None) - before < 0.5 * size


def test_every_work_has_a_tiny_size_and_every_strategy_a_system() -> None:
    assert WORKS.keys() == TINY.keys()
    assert all(any(each.kind == "own" for each in entries) for entries in SYSTEMS.values())


@pytest.mark.parametrize("strategy", ["data_parallel", "zero3"])
def test_the_limits_do_the_work_of_one_rank(strategy: str) -> None:
    """Each of the same samples, and of the same part of the updates."""
    job = Job("gpt", TINY["gpt"], strategy, rank=1, ranks=2)
    losses = []
    for build in (limits.eager, limits.aten):
        system = build(job)
        losses.append([system.step() for _ in range(4)])
        system.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    alone = plain.eager(Job("gpt", TINY["gpt"], "single"))
    whole = [alone.step() for _ in range(4)]
    assert losses[0] != pytest.approx(whole, rel=1e-4)
    system = limits.eager(replace(job, strategy="data_parallel"))
    all_updated = [system.step() for _ in range(4)]
    assert (losses[0] == all_updated) == (strategy == "data_parallel")
    assert all_updated[3] <= losses[0][3] < losses[0][0]
