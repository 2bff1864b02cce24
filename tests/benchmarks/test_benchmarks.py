"""The benchmarks run, with sizes so small that their figures mean nothing, and write what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import topics
from benchmarks.measure import compare, interleave

ROOT = Path(__file__).parents[2]


def run(folder: Path, *command: str) -> None:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stdout


def result(folder: Path, name: str) -> dict[str, object]:
    found = json.loads((folder / f"runs/bench/{name}.json").read_text())
    assert found["machine"]["cores"] == os.cpu_count()
    assert topics.lines({name: found})  # the page has rows of it
    return dict(found)


@pytest.mark.slow
def test_memory_is_flat(tmp_path: Path) -> None:
    run(tmp_path, "-m", "benchmarks.memory_flat", "--steps", "20", "--samples", "2")
    found = result(tmp_path, "memory_flat")
    assert {
        found[name]["live_tensor_growth"] for name in ("data parallel", "zero 3", "pipeline")
    } == {0}


@pytest.mark.slow
@pytest.mark.thorough
def test_compile_time(tmp_path: Path) -> None:
    run(
        tmp_path,
        "-m",
        "benchmarks.compile_time",
        "--layers",
        "1",
        "2",
        "--repeats",
        "1",
        "--no-kernels",
    )
    found = result(tmp_path, "compile_time")
    assert set(found["data_parallel"]["planning_seconds"]) == {"1", "2"}


@pytest.mark.thorough
@pytest.mark.slow
def test_eager_overhead(tmp_path: Path) -> None:
    run(tmp_path, "-m", "benchmarks.eager_overhead", "--rounds", "1", "--steps", "2")
    found = result(tmp_path, "eager_overhead")
    assert list(found) == ["no_grad", "forward", "forward_backward", "machine"]
    assert found["forward"]["weft_us_per_op"] == pytest.approx(
        found["forward"]["weft_seconds"] / 30 * 1e6
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_overhead(tmp_path: Path) -> None:
    run(tmp_path, "-m", "benchmarks.overhead", "--rounds", "1", "--cases", "mlp width 64")
    found = result(tmp_path, "overhead")["mlp width 64"]
    assert found["overhead"] == pytest.approx(1 / found["speed_relative_to_peer"] - 1)


def test_rounds_alternate_and_the_first_does_not_count() -> None:
    calls: list[str] = []
    sides = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = interleave(sides, rounds=2, steps=1, before=lambda: calls.append("."))
    assert "".join(calls) == ".b.a.a.b.b.a"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


def test_the_ratio_is_that_of_the_same_round() -> None:
    found = compare({"a": [1.0, 2.0, 8.0], "b": [2.0, 4.0, 8.0]}, ours="a", peer="b")
    assert found["speed_relative_to_peer"] == 2.0
    assert (found["lowest_ratio"], found["highest_ratio"]) == (1.0, 2.0)
    assert (found["a_seconds"], found["b_seconds"]) == (2.0, 4.0)
