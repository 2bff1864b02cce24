"""The harness: rows of systems that run, and of those that fail or train something else."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.crew import SystemFailure
from benchmarks.memory import peak_bytes
from benchmarks.references import check
from benchmarks.rounds import Side, settled, worth_the_time
from benchmarks.rows import Found, rows
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
rows = compare(job, entries, "host", Bench(rounds=2))
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
    return list(json.loads(out.read_text()))


@pytest.mark.slow
def test_a_pair_has_a_row_for_each_system(tmp_path: Path) -> None:
    pair = (
        "--work",
        "resnet50",
        "--strategy",
        "data_parallel",
        "--systems",
        "limit",
        "ddp",
        "weft",
    )
    found = run(tmp_path, "-m", "benchmarks.compare", *pair, "--tiny", "--rounds", "2", "--out")
    limit, ddp, weft = found
    assert [row["system"] for row in found] == ["limit", "ddp", "weft"]
    for row in found:
        assert (row["work"], row["strategy"], row["link"]) == ("resnet50", "data_parallel", "host")
        assert row["rounds"] == 2
        assert 0 < row["spread"][0] <= row["seconds"] <= row["spread"][1]
        assert row["compile_seconds"] > 0
        assert row["peak_bytes"] > 10_000
    # BatchNorm: ranks of DDP have statistics of their own, weft those of the whole batch.
    assert ddp["losses_agree"] < 1e-3
    assert weft["losses_agree"] < 1e-3
    assert (limit["losses_agree"], limit["ratio_to_limit"], ddp["ratio_to_best_peer"]) == (
        None,
    ) * 3
    assert weft["ratio_to_limit"] > 1
    assert weft["best_peer"] == "ddp"
    low, high = weft["ratio_spread"]
    assert 0 < low <= weft["ratio_to_best_peer"] <= high
    assert weft["warm_compile_seconds"] > 0


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
    return Found(Entry(name, lambda job: None, kind), seconds, 1.0, None, 100, None, 0.0)  # type: ignore[arg-type,return-value]


def test_ratios_are_those_of_the_same_round() -> None:
    limit = found("limit", "limit", 1.0, 2.0, 4.0)
    slow, fast = found("peer", "slow", 9.0, 9.0, 9.0), found("peer", "fast", 2.0, 3.0, 8.0)
    own = found("own", "weft", 2.0, 2.0, 4.0)
    lines = rows(
        {"work": "mlp", "strategy": "zero3", "link": "1gbit"},
        [limit, slow, fast, own],
        {"odd": "why"},
    )
    assert lines[3]["best_peer"] == "fast"
    assert lines[3]["ratio_to_best_peer"] == 1.5
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
    return Side(entry, None, 1.0, None, 100, None, 1.0, list(seconds))  # type: ignore[arg-type]


def test_a_peer_that_others_beat_is_timed_in_the_first_rounds_only() -> None:
    own, limit = side("own", "weft", 9.0, 9.0, 9.0), side("limit", "limit", 9.0, 9.0, 9.0)
    fast, near = side("peer", "fast", 1.0, 1.0, 1.0), side("peer", "near", 1.3, 1.3, 9.0)
    slow, early = side("peer", "slow", 1.0, 1.4, 1.4), side("peer", "early", 1.4, 1.4)
    assert worth_the_time([own, limit, fast, near, slow, early]) == [own, limit, fast, near, early]


def test_rounds_end_when_the_ratios_to_the_best_peer_and_the_limit_are_known() -> None:
    own, limit = side("own", "weft", *[1.0] * 5), side("limit", "limit", *[1.0] * 5)
    other = side("own", "weft auto", *[1.5] * 5)
    steady = side("peer", "steady", 2.0, 2.01, 2.02, 2.0, 2.01)
    restless = side("peer", "restless", 1.0, 1.5, 2.0, 1.5, 1.0)
    assert settled([own, other, limit, steady])
    assert not settled([own, other, limit, steady, restless])
    assert settled([own])
    many = side("peer", "many", *[2.0, 2.06] * 12)
    assert settled([side("own", "weft", *[1.0] * 24), many])
    assert not settled([own, side("peer", "few", *many.seconds[:5])])


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


def test_every_work_has_a_tiny_size_and_every_strategy_a_system() -> None:
    assert WORKS.keys() == TINY.keys()
    assert all(any(each.kind == "own" for each in entries) for entries in SYSTEMS.values())
