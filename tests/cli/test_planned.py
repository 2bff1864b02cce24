"""`weft plan` and `weft simulate`, where torch cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import weft
from models import GPT, token_batch, token_loss
from weft.cli.main import app
from weft.ir import parse_plan

TITLE = "GPT on 2x2 of h100x4, captured for 'cpu': its ops are in the form of that device"
BLOCKED = "import sys; sys.modules['torch'] = None; from weft.cli.main import app; app()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graph file and a strategy for it."""
    path = tmp_path_factory.mktemp("planned")
    torch.manual_seed(0)
    model = GPT(layers=2)
    job = weft.Job(model, token_loss, torch.optim.AdamW(model.parameters()), token_batch())
    job.stored("cpu").save(path / "gpt.graph")
    weft.Strategy(
        batch={"*": weft.split(0)}, parameters={"*": weft.broadcast}, stages=2, micro_batches=2
    ).save(path / "s.yaml")
    return path


def blocked(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a Python that has no torch."""
    command = [sys.executable, "-c", BLOCKED, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})


def test_plans_are_made_without_torch(folder: Path) -> None:
    options = ["--strategy", "s.yaml", "--topology", "h100x4", "-o", "plan"]
    done = blocked(folder, "plan", "gpt.graph", *options)
    assert (done.returncode, done.stderr) == (0, "")
    plan = folder / "plan"
    assert done.stdout == (plan / "summary.txt").read_text()
    assert done.stdout.startswith(f"{TITLE}\n2 stages, 4 ranks in 2 classes of equal ones\n")
    assert (plan / "classes.txt").read_text() == (
        "rank 0 stands for 2: 0-1\nrank 2 stands for 2: 2-3\n"
    )
    for rank in (0, 2):
        text = (plan / f"rank_{rank}.txt").read_text()
        found = parse_plan(text)
        assert str(found) == text
        assert [each.rank for each in found.ranks] == [rank]


def test_steps_are_simulated_without_torch(folder: Path) -> None:
    options = ["--strategy", "s.yaml", "--topology", "h100x4", "--grid", "2x2", "--trace", "t.json"]
    done = blocked(folder, "simulate", "gpt.graph", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{TITLE}\n")
    assert "models.py" in done.stdout  # the user's lines
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 2}


def test_json_is_for_machines(folder: Path) -> None:
    graph, strategy = str(folder / "gpt.graph"), str(folder / "s.yaml")
    result = run("simulate", graph, "--strategy", strategy, "--topology", "h100x4", "--json")
    found = json.loads(result.output)
    assert found["title"] == TITLE
    assert (found["devices"], found["samples"], found["tokens"]) == (4, 4, 32)
    assert found["step_seconds"] > 0
    assert (
        run("simulate", graph, "--strategy", strategy, "--topology", "h100x4", "--json").output
        == result.output
    )


def test_given_costs_count(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").write_text("stages: {'*': {forward: 1.0, backward: 2.0}}\n")
    options = ["--topology", "h100x2", "--json"]
    result = run(
        "simulate", str(folder / "gpt.graph"), *options, "--costs", str(tmp_path / "costs.yaml")
    )
    assert json.loads(result.output)["step_seconds"] == pytest.approx(3.0, rel=0.01)


def test_capture_and_run_say_that_they_need_torch(folder: Path) -> None:
    done = blocked(folder, "capture", "my_job:job", "-o", "a.graph")
    assert done.returncode == 2
    assert done.stderr.startswith("error: this command needs PyTorch")
    assert len(done.stderr.splitlines()) == 1


def test_help_needs_no_torch(folder: Path) -> None:
    done = blocked(folder, "--help")
    assert done.returncode == 0
    for command in ("run", "capture", "plan", "simulate", "ops"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.graph", "--topology", "h100x4"], "there is no graph file none.graph"),
        (["gpt.graph", "--topology", "h10x4"], "no topology is named 'h10'; did you mean 'h100'?"),
        (["gpt.graph", "--topology", "h100x4", "--grid", "3x"], "--grid must be"),
        (["gpt.graph", "--topology", "h100x4", "--grid", "8"], "8 ranks, the topology has 4"),
        (["gpt.graph", "--topology", "h100x4", "--strategy", "none.yaml"], "none.yaml"),
        (["gpt.graph", "--topology", "h100x3", "--strategy", "s.yaml"], "2 stages do not divide 3"),
        (["s.yaml", "--topology", "h100x4"], "s.yaml is not a graph file: expected a first line"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(folder)
    for command in (["simulate"], ["plan", "-o", "bad"]):
        result = run(*command, *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not Path("bad").exists()


def test_folders_with_other_files_are_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.md").touch()
    result = run("plan", str(folder / "gpt.graph"), "--topology", "h100x2", "-o", str(tmp_path))
    assert (result.exit_code, "holds 'notes.md'" in result.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]


def test_an_earlier_plan_is_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rank_7.txt").touch()
    result = run("plan", str(folder / "gpt.graph"), "--topology", "h100x2", "-o", str(tmp_path))
    assert result.exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "rank_0.txt",
        "classes.txt",
        "summary.txt",
    }
