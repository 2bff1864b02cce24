"""`weft search`: where torch cannot be imported, and interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import weft
from search.jobs import layers
from weft.atomic_files import write_atomically
from weft.cli import search as command
from weft.cli.main import app
from weft.search.evaluator import Evaluator
from weft.search.record import SearchRecord
from weft.search.state import SearchLog, SearchState
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
    plan, seen = SearchLog.plan, []

    def interrupted(self: SearchLog, *arguments: object) -> object:
        seen.append(1)
        if len(seen) > 3:
            raise KeyboardInterrupt
        return plan(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SearchLog, "plan", interrupted)
    output = graph.parent / "so_far.yaml"
    done = run("search", graph, "--topology", "h100x2", "-o", output, "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.output)["tried"]) == 3
    assert Strategy.load(output).grid


def test_interrupted_twice_it_has_written_all_it_knew(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C comes while the result is made."""
    plan, seen = SearchLog.plan, []

    def interrupted(self: SearchLog, *arguments: object) -> object:
        seen.append(1)
        if len(seen) > 4:
            raise KeyboardInterrupt
        return plan(self, *arguments)  # type: ignore[arg-type]

    def again(self: SearchState) -> object:
        assert not self.affords()
        raise KeyboardInterrupt

    monkeypatch.setattr(SearchLog, "plan", interrupted)
    monkeypatch.setattr(SearchState, "result", again)
    output = graph.parent / "twice.yaml"
    done = run("search", graph, "--topology", "h100x2", "-o", output)
    assert done.exit_code == 130, done.output
    record = SearchRecord.load(output.with_suffix(".search.json"))
    assert record.best == Strategy.load(output)
    assert len(record.learned.answers) == 4


def test_interrupted_before_it_knows_any_it_says_so(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(SearchLog, "plan", interrupted)
    output = graph.parent / "none.yaml"
    done = run("search", graph, "--topology", "h100x2", "-o", output)
    assert (done.exit_code, done.stderr) == (
        130,
        "interrupted before a strategy that fits was planned\n",
    )
    assert not output.exists()


def test_killed_at_any_moment_the_record_has_the_strategy(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written first, and again where nothing quicker is found for a while."""
    written = list[str]()
    save = SearchRecord.save
    monkeypatch.setattr(
        SearchRecord, "save", lambda self, path: (written.append("record"), save(self, path))
    )
    monkeypatch.setattr(
        command,
        "write_atomically",
        lambda *each: (written.append("strategy"), write_atomically(*each)),
    )
    record = weft.search(graph, "h100x2", moves=1, planners=0).record
    clock = iter((0.0, 1.0, 50.0, 52.0, 52.0, 53.0))  # it took a second
    monkeypatch.setattr(command, "monotonic", lambda: next(clock))
    files = command.SearchFiles(graph.parent / "order.yaml")
    for expected in (["record", "strategy"], [], ["record"]):
        files.write(record.best, lambda: record)
        assert written == expected
        written.clear()


def test_it_goes_on_where_it_ended(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted, both files are there; resumed, nothing that was planned is planned again."""
    output = graph.parent / "parts.yaml"
    search = ("search", graph, "--topology", "h100x2", "-o", output, "--moves", 8)
    begun = run(*search, "--resume", "--json")
    assert "nothing to resume" in begun.stderr
    assert begun.exit_code == 0, begun.output
    first = json.loads(begun.stdout)
    record = graph.parent / "parts.search.json"
    assert SearchRecord.load(record).best == Strategy.load(output)

    made = list[object]()
    priced = Evaluator._priced

    def noted(self: Evaluator, strategy: Strategy) -> object:
        made.append(strategy)
        return priced(self, strategy)

    monkeypatch.setattr(Evaluator, "_priced", noted)
    done = run(*search, "--resume", "--json")
    assert done.exit_code == 0, done.output
    second = json.loads(done.stdout)
    assert len(made) <= 8 + 2  # and the simulations of the best at first and at last
    assert second["simulation"]["step_seconds"] <= first["simulation"]["step_seconds"]
    assert len(SearchRecord.load(record).learned.answers) > len(first["tried"])


def test_beside_what_is_no_file_there_is_no_record(graph: Path) -> None:
    (graph.parent / "null").symlink_to("/dev/null")
    search = ("search", graph, "--topology", "h100x2", "--moves", 2)
    assert run(*search, "-o", graph.parent / "null").exit_code == 0
    assert not list(graph.parent.glob("null.*"))


def test_what_cannot_be_resumed_is_told(graph: Path) -> None:
    output = graph.parent / "other.yaml"
    search = ("search", graph, "--moves", 2, "--resume")
    assert run("search", graph, "--topology", "h100x2", "--moves", 2, "-o", output).exit_code == 0
    for said, arguments in (
        ("with another graph or topology", ("--topology", "h100x4", "-o", output)),
        ("give one of them", ("--topology", "h100x2", "-o", output, "--start", output)),
        ("give -o best.yaml", ("--topology", "h100x2")),
    ):
        done = run(*search, *arguments)
        assert done.exit_code == 2
        assert said in done.output
    output.with_suffix(".search.json").write_text("{}")
    done = run(*search, "--topology", "h100x2", "-o", output)
    assert done.exit_code == 2
    assert "cannot be read" in done.output


def test_bad_arguments_are_told(graph: Path) -> None:
    done = run("search", graph, "--topology", "h100x2", "--seconds", 0)
    assert done.exit_code == 2
    assert "seconds must be a number above 0" in done.output
    # Before the search, which would take a minute.
    done = run("search", graph, "--topology", "h100x2", "-o", graph.parent / "no" / "a")
    assert done.exit_code == 2
    assert "give a path that can be written" in done.output


def test_a_page_that_cannot_be_written_is_refused_before_the_search(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.search.search", lambda *_, **__: pytest.fail("the search began"))
    (tmp_path / "file").write_text("")
    for place, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "a.html", "")):
        done = run("search", graph, "--topology", "h100x2", "--report", place)
        assert done.exit_code == 2
        assert f"error: cannot write the report {place}: {why}" in done.stderr
