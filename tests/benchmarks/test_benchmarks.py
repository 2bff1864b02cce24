"""The benchmarks run, with sizes so small that their figures mean nothing, and write what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning
from benchmarks.measure import interleave

ROOT = Path(__file__).parents[2]


def run(folder: Path, *command: str) -> None:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stdout


def result(folder: Path, name: str) -> dict[str, Any]:
    found = json.loads((folder / f"runs/bench/{name}.json").read_text())
    assert found["machine"]["cores"] == os.cpu_count()
    return dict(found)


@pytest.mark.slow
def test_planning(tmp_path: Path) -> None:
    run(tmp_path, "-m", "benchmarks.planning", "--cases", "gpt/8x4", "--gpt-layers", "8")
    found = result(tmp_path, "planning")["cases"]["gpt/8x4"]
    assert (found["ranks"], found["planned"]) == (32, 8)
    assert next(iter(found["seconds"])) == "capturing"


def test_every_case_of_planning_has_a_strategy_for_its_ranks() -> None:
    for name, case in planning.cases(8, 16).items():
        strategy = case.strategy(case.placement)
        if isinstance(strategy.stages, int):
            assert case.grid[0] % max(1, strategy.stages) == 0, name
        else:
            ranks = [rank for stage in strategy.stages for rank in stage.placement.ranks]
            assert sorted(ranks or case.placement.ranks) == list(case.placement.ranks), name


def test_rounds_alternate_and_the_first_does_not_count() -> None:
    calls: list[str] = []
    sides = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = interleave(sides, rounds=2, steps=1, before=lambda: calls.append("."))
    assert "".join(calls) == ".b.a.a.b.b.a"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}
