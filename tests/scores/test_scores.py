"""Stamps of pages, how pages age, and that a row that is other now is told with what renews it."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.page import section
from benchmarks.rows import Found as Timed
from benchmarks.rows import rows as rows_of_pair
from benchmarks.systems.table import SYSTEMS
from tools.combinations import Combination, cell_of
from tools.scores import pages, samples
from tools.scores.__main__ import drifts, old
from tools.scores.pages import COMMITS, COMMITS_OF_AN_HOUR, DAYS, PAGES, Page, complaints
from tools.scores.samples import Found, drift, named_rows, rows_of, same_plan
from tools.scores.stamp import (
    ROOT,
    Stamp,
    contents,
    contents_at,
    digest,
    restamped,
    stamp_now,
    stamps_of,
)

COMMAND = "python -m it"
TODAY = date(2026, 3, 1)
PRECISIONS: tuple[Literal["bf16"] | None, ...] = (None, "bf16")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a source, committed."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("one\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *command: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *command], cwd=tree, check=True, timeout=60)


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "all")


def test_a_stamp_stands_on_a_page_as_text() -> None:
    stamp = stamp_now(COMMAND, ["tools/scores", "tools/models.py"])
    text = f"# Page\n\n{stamp}\n\nRows.\n"
    assert stamps_of(text) == [stamp]
    later = replace(stamp, day=TODAY)
    assert stamps_of(restamped(text, later)) == [later]
    with pytest.raises(ValueError, match="no line says that `python -m other` made the page"):
        restamped(text, replace(stamp, command="python -m other"))


def test_contents_are_told_from_others_and_are_those_of_the_commit(tree: Path) -> None:
    before = contents(tree, ["src"])
    assert before == contents_at("HEAD", ["src"], tree)
    (tree / "src/a.py").write_text("two\n")
    assert digest(contents(tree, ["src"])) != digest(before)
    (tree / "src/a.py").write_text("one\n")
    (tree / "src/note.txt").write_text("no source\n")
    assert digest(contents(tree, ["src"])) == digest(before)
    (tree / "src/a.py").rename(tree / "src/b.py")
    assert digest(contents(tree, ["src"])) != digest(before)
    with pytest.raises(ValueError, match="gone is not there"):
        contents(tree, ["gone"])


def stamp(tree: Path, days: int) -> Stamp:
    made = stamp_now(COMMAND, ["src"], tree)
    return replace(made, day=TODAY - timedelta(days))


def told(tree: Path, text: str) -> list[str]:
    return list(complaints(text, (COMMAND,), tree, TODAY))


def test_a_page_whose_sources_are_the_same_never_ages(tree: Path) -> None:
    made = stamp(tree, 5000)
    assert told(tree, str(made)) == []
    (tree / "src/a.py").write_text("two\n")
    (line,) = told(tree, str(made))
    assert f"5000 days old, more than {DAYS}: `{COMMAND}` renews it" in line
    assert told(tree, str(replace(made, day=TODAY - timedelta(DAYS)))) == []


def test_a_page_ages_by_commits_of_its_sources(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = replace(stamp(tree, 0), day=date(2020, 1, 1))
    (tree / "src/a.py").write_text("two\n")
    commit(tree)
    (tree / "other.py").write_text("no source\n")
    commit(tree)
    assert pages.commits_since(made, tree) == 2
    near = str(replace(made, day=TODAY))
    monkeypatch.setattr(pages, "commits_since", lambda *_: COMMITS + 1)
    (line,) = told(tree, near)
    assert f"{COMMITS + 1} commits have changed its sources" in line
    assert f"`{COMMAND}` renews it" in line


@pytest.mark.parametrize(
    ("name", "allowed"), [("combinations.md", COMMITS_OF_AN_HOUR), ("benchmarks.md", COMMITS)]
)
def test_a_page_that_an_hour_renews_is_old_earlier(
    monkeypatch: pytest.MonkeyPatch, name: str, allowed: int
) -> None:
    (page,) = (page for page in PAGES if page.name == name)
    monkeypatch.setattr(pages, "is_changed", lambda *_: True)
    monkeypatch.setattr(pages, "DAYS", 10**6)
    monkeypatch.setattr(pages, "commits_since", lambda *_: allowed)
    assert list(old([page])) == []
    monkeypatch.setattr(pages, "commits_since", lambda *_: allowed + 1)
    (line,) = old([page])
    assert (
        f"docs/{name}: {allowed + 1} commits have changed its sources, more than {allowed}" in line
    )


def test_a_page_without_a_stamp_is_told(tree: Path) -> None:
    (line,) = told(tree, "# Page\n")
    assert f"no line says when `{COMMAND}` made it" in line


def test_every_page_says_by_which_commands_it_was_made() -> None:
    for page in PAGES:
        made = stamps_of(page.path.read_text())
        assert [stamp.command for stamp in made] == list(page.commands), page.name
        assert all((ROOT / source).exists() for stamp in made for source in stamp.sources)


def holds(text: str, draw: random.Random) -> Iterator[Found]:
    yield f"row {draw.randrange(10**9)}", ""


def is_other(text: str, draw: random.Random) -> Iterator[Found]:
    yield "row", "2, not 1"


def fails(text: str, draw: random.Random) -> Iterator[Found]:
    yield "first", ""
    raise OSError("gone")


def test_rows_that_are_other_are_told_with_what_renews_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Page("ops.md", (COMMAND,), (holds, is_other, fails))
    other, failed = sorted(drifts([page], "seed", 60.0), key=lambda line: "OSError" in line)
    assert "docs/ops.md: row: 2, not 1" in other
    assert f"or renew: `{COMMAND}`" in other
    assert "a row: OSError: gone" in failed
    assert "first holds" in capsys.readouterr().out


def test_the_same_seed_draws_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page("ops.md", (COMMAND,), (holds,))
    outs = []
    for seed in ("one", "one", "two"):
        assert list(drifts([page], seed, 60.0)) == []
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2]


def test_what_the_time_does_not_suffice_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page("ops.md", (COMMAND,), (is_other,))
    assert list(drifts([page], "seed", 0.0)) == []
    assert "ops.md: no turn this time" in capsys.readouterr().out


def test_rounding_is_no_drift() -> None:
    assert drift("3e-15", "1e-15") == ""
    assert drift("3e-15", "0e+00") == ""
    assert drift("1e-12", "1e-15") == "1e-12, not 1e-15"
    assert drift("**1e-03 (head)**", "1e-15") == "**1e-03 (head)**, not 1e-15"
    assert "the page has **RuleError**" in drift("1e-15", "**RuleError**")
    assert drift("**2.0e+00**", "**2.1e+00**") == ""


def test_cells_of_combinations_show_what_is_above_the_limit() -> None:
    double, half = (Combination("gpt", "data 4", 0, False, p) for p in PRECISIONS)
    assert [cell_of(half, found) for found in (1.96, 2.04)] == ["1.96", "**2.04 > 2**"]
    assert [cell_of(double, found) for found in (3e-15, 2e-9)] == ["3.0e-15", "**2.0e-09 > 1e-09**"]


@pytest.mark.parametrize(
    ("cell", "now", "same"),
    [
        (5, "10.75", True),
        (5, "10.9", False),
        (6, "48", True),
        (6, "50", False),
        (7, "0.81 <", False),
        (7, "0.80", False),
        (11, "0.91", True),
        (11, "0.80", False),
        (11, "**1.00 !**", False),
        (12, "0.71", False),
        (12, "0.00", False),
        (4, "16", False),
    ],
)
def test_a_plan_at_real_size_may_differ_in_memory_alone(cell: int, now: str, same: bool) -> None:
    cells = (
        "4 | 32 × 2048 | fp32 | data | 8 | 10.7 | 44.8 | 0.80 < | 1.00 | 1.00 | 1.00 | 1.00 | 0.70"
    )
    other = [now if i == cell else each for i, each in enumerate(cells.split(" | "))]
    assert same_plan(f"| {' | '.join(other)} |", f"| {cells} |") is same
    assert same_plan(f"| {cells} |", f"| {' | '.join(other)} |") is same


def test_rows_are_told_by_their_number_of_columns() -> None:
    text = "| a | b |\n|---|---|\n| x | y \\| z |\n| 1 | 2 | 3 |\n"
    assert rows_of(text, 2) == [["a", "b"], ["x", "y \\| z"]]


def test_rows_are_told_by_the_heads_of_their_columns() -> None:
    text = "| a | b |\n|---|---|\n| 1 | 2 |\n\n| b | c |\n| --- | --- |\n| 3 | |\n| - | 4 |\n"
    assert list(named_rows(text, "b")) == [
        {"a": "1", "b": "2"},
        {"b": "3", "c": ""},
        {"b": "-", "c": "4"},
    ]
    assert list(named_rows(text, "a", "c")) == []


def measured(work: str, **seconds: float) -> list[dict[str, Any]]:
    """Rows of six rounds of a work on one device, as `benchmarks.compare` writes them."""
    entries = {entry.name.replace(".", "_"): entry for entry in SYSTEMS["single"]}
    found = [
        Timed(entries[name], [each] * 6, 1.0, None, 2**20, 2**21, 0.0, 0.0)
        for name, each in seconds.items()
    ]
    return rows_of_pair({"work": work, "strategy": "single", "ranks": 1, "link": "host"}, found, {})


@pytest.mark.parametrize(
    ("now", "told"), [(1.6, ""), (1.4, "1.40× eager, not 3.00×"), (None, "failed: gone")]
)
def test_the_page_of_benchmarks_is_read_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, now: float | None, told: str
) -> None:
    """Beside eager PyTorch, also where the page's best peer is another."""
    works = ("mlp_small", "lstm")
    rows = [row for w in works for row in measured(w, eager=3.0, torch_compile=1.5, weft=1.0)]
    found = {"cores": 2, "processor": "x86_64", "torch": "2.13", "python": "3.11"}
    result = {"machine": found, "rows": rows, "loads": {}, "command": "it", "malloc": "kept"}
    text = section({**result, "minutes": 1.0, "made": str(stamp_now("make bench", ["benchmarks"]))})

    def run(module: str, *options: str) -> str:
        again = measured("lstm", eager=now or 1.0, weft=1.0)
        if now is None:
            again[1] = {"system": "weft", "error": "gone"}
        Path(options[options.index("--out") + 1]).write_text(json.dumps({"rows": again}))
        return ""

    monkeypatch.setattr(samples, "_run", run)
    ((name, said),) = samples.benchmarks(text, random.Random(0))
    assert name.partition("/")[0] in works
    assert said == told


def test_the_page_of_benchmarks_that_is_there_can_be_read() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    assert all(samples.faster_than_eager(text, work) > 0 for work in ("mlp_small", "lstm"))
