"""The options of the command line."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weft import cli
from weft.cli import main
from weft.cli.run import RunOptions
from weft.runtime.world.launchers import Nodes

# The script, its arguments, and the fields of a fleet.
Started = list[tuple[Path, list[str], RunOptions]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    runs: Started = []

    def record(script: Path, arguments: list[str], *fleet: Any) -> int:
        runs.append((script, list(arguments), *fleet))
        return 7

    monkeypatch.setattr(cli, "run_script", record)
    return runs


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.touch()
    return path


def test_version() -> None:
    assert CliRunner().invoke(main.app, ["--version"]).stdout == f"weft {version('weft')}\n"


def test_options_before_the_script_are_weft_s_and_those_behind_are_the_script_s(
    script: Path, started: Started
) -> None:
    result = CliRunner().invoke(main.app, ["run", "-n", "2", str(script), "-n", "9", "--nodes=4"])
    assert result.exit_code == 7
    assert started == [(script, ["-n", "9", "--nodes=4"], RunOptions(2))]


def test_several_nodes(script: Path, started: Started) -> None:
    options = ["-n", "8", "--nnodes", "2", "--rendezvous", "first:29400", "--run-id", "a"]
    options += ["--timeout", "5", "--grace", "90"]
    CliRunner().invoke(main.app, ["run", *options, str(script)])
    nodes = Nodes(2, "first:29400", "a")
    assert started == [(script, [], RunOptions(8, nodes, 5.0, grace=90.0))]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "2"], "--rendezvous host:port and --run-id"),
        (["-n", "0"], "'-n' / '--ranks'"),
        (["--timeout", "0"], "'--timeout'"),
        (["-n", "2", "--min-ranks", "2"], "--min-ranks goes with --restarts"),
        (["-n", "2", "--restarts", "1", "--min-ranks", "5"], "--min-ranks"),
        (["--restarts", "-1"], "'--restarts'"),
    ],
)
def test_bad_options_are_refused(
    script: Path,
    started: Started,
    options: list[str],
    words: str,
) -> None:
    result = CliRunner().invoke(main.app, ["run", *options, str(script)], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in result.output
    assert not started


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main.app, ["run", str(tmp_path / "none.py")], env={"COLUMNS": "300"}
    )
    assert result.exit_code == 2
    assert "does not exist" in result.output
