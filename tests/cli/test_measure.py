"""`weft measure`: which ranks it starts, and what it says of what they kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import weft
from weft.cli import measure
from weft.cli.main import app
from weft.cli.run import RunOptions
from weft.hardware.measured_costs import Measurements, Sample
from weft.hardware.measured_store import cores, store_measurements, this_machine
from weft.units import Seconds


class Started:
    """In the place of `run_script`: keeps a call for as many ranks as were asked for, and the arguments."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.runs: list[tuple[list[str], int]] = []

    def __call__(self, script: Path, arguments: Sequence[str], options: RunOptions) -> int:
        assert script.exists()
        processes = options.ranks
        self.runs.append((list(arguments), processes))
        os.environ.setdefault("OMP_NUM_THREADS", "3")
        facts = {"device": "cpu", "ranks": int(arguments[0]), "processes": processes, "threads": 1}
        found = {"aten.neg.default(float32[2])": Sample(Seconds(1.0))}
        store_measurements(Measurements({**this_machine(), **facts}, found, act=Seconds(5e-6)))
        return self.code


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    found = Started()
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(measure, "run_script", found)
    return found


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["measure", *arguments], env={"COLUMNS": "300"})


def test_a_machine_is_measured_with_several_numbers_of_ranks(started: Started) -> None:
    result = run()
    assert result.exit_code == 0
    assert [(arguments[0], count) for arguments, count in started.runs] == [
        *(("1", 1), ("2", 2), ("4", 4), ("2", 1)),
    ]
    assert [arguments[1:] for arguments, _ in started.runs] == [[str(n), "4"] for n in range(4)]
    lines = result.output.splitlines()
    assert lines[0] == (
        "1 rank in 1 process of 1 thread: 1 call, 0 optimizers, 0 exchanges; host: 0.005 ms an act, 0 ms a step"
    )
    assert len(lines) == 5
    assert "kept in" in lines[-1]
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_job_is_measured_on_the_ranks_that_are_asked_for(
    started: Started, tmp_path: Path
) -> None:
    job, strategy = "planning.graph_texts:Path", str(tmp_path / "s.yaml")
    weft.data_parallel().save(strategy)
    run(job)
    run(job, "-n", "3", "--strategy", strategy)
    assert started.runs == [
        ([str(cores()), "0", "1", job, ""], cores()),
        (["3", "0", "1", job, strategy], 3),
    ]


def test_what_is_not_there_is_told_before_ranks_start(started: Started) -> None:
    for wrong in (["none_here:job"], ["planning.graph_texts:Path", "--strategy", "none.yaml"]):
        result = run(*wrong)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("error: ")
    assert not started.runs


def test_what_was_known_before_is_not_told_again() -> None:
    assert len(run("-n", "2").output.splitlines()) == 2
    assert len(run("-n", "2").output.splitlines()) == 1


def test_a_rank_that_fails_ends_the_command(started: Started) -> None:
    started.code = 1
    assert run().exit_code == 1
    assert len(started.runs) == 1


def test_a_strategy_without_a_job_is_refused() -> None:
    result = run("--strategy", "s.yaml")
    assert result.exit_code == 2
    assert "name one" in result.output
