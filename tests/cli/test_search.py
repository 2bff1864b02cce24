"""`weft search`: where torch cannot be imported, and interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from search.jobs import layers
from weft.cli.main import app
from weft.search.enumeration import Enumeration
from weft.strategy.strategy import Strategy

BLOCKED = "import sys; sys.modules['torch'] = None; from weft.cli.main import app; app()"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("searched") / "a.graph"
    layers().save(path)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "300"})


def test_strategies_are_searched_without_torch(graph: Path) -> None:
    arguments = ["search", graph.name, "--topology", "h100x2", "--moves", "6", "-o", "best.yaml"]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments],
        cwd=graph.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("best: ")
    assert Strategy.load(graph.parent / "best.yaml").grid


def test_interrupted_it_keeps_the_best(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, seen = Enumeration.plan, []

    def interrupted(self: Enumeration, *arguments: object) -> object:
        seen.append(1)
        if len(seen) > 3:
            raise KeyboardInterrupt
        return plan(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Enumeration, "plan", interrupted)
    output = graph.parent / "so_far.yaml"
    done = run("search", graph, "--topology", "h100x2", "-o", output, "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.output)["tried"]) == 3
    assert Strategy.load(output).grid


def test_bad_arguments_are_told(graph: Path) -> None:
    done = run("search", graph, "--topology", "h100x2", "--seconds", 0)
    assert done.exit_code == 2
    assert "seconds takes a number above 0" in done.output
    done = run(
        "search", graph, "--topology", "h100x2", "--moves", 1, "-o", graph.parent / "no" / "a"
    )
    assert done.exit_code == 2
    assert "give a path that can be written" in done.output
