"""The program that measures searches: what is known is not run again, what is found is kept, a miss is counted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import search_bench
from benchmarks.crew import Crew
from benchmarks.rounds import Side
from benchmarks.rows import Found
from benchmarks.search import here
from benchmarks.search.trial import Finding, Trial, seconds_text
from benchmarks.systems.table import Entry


def _nothing(_: float) -> list[Finding]:
    return []


def test_names_are_told_apart_and_parts_can_be_chosen() -> None:
    trials = search_bench.every_trial()
    assert {each.part for each in trials.values()} >= {"times", "holds", "flexflow", "here"}
    chosen = [
        name
        for name, each in trials.items()
        if search_bench._wanted(each, ["flexflow"], ["AlexNet", "NMT"])
    ]
    assert len(chosen) == 16
    assert all(name.startswith("flexflow/") for name in chosen)


def test_what_is_found_is_kept_trial_by_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails is said, and the next one runs."""

    def apart(trial: Trial, seconds: float) -> tuple[list[dict[str, Any]], str]:
        assert seconds == 3.0
        if trial.name == "a/broken":
            return [], "ended with 1: no"
        return [{"what": trial.name, "target": "", "measured": "1"}], ""

    monkeypatch.setattr(search_bench, "_apart", apart)
    path = tmp_path / "deep" / "found.json"
    o = argparse.Namespace(seconds=60.0, search_seconds=3.0, json=path)
    trials = [Trial(name, _nothing) for name in ("a/broken", "a/one")]
    known: dict[str, Any] = {"b/old": {"found": [], "seconds": 1.0}}
    assert search_bench.run(trials, known, o)
    assert "a/broken: ended with 1: no" in capsys.readouterr().out
    kept = json.loads(path.read_text())["trials"]
    assert kept.keys() == {"b/old", "a/one"}
    assert Finding(**kept["a/one"]["found"][0]).measured == "1"
    late = argparse.Namespace(seconds=-1.0, search_seconds=3.0, json=None)
    assert not search_bench.run(trials, known, late)
    assert "2 trials are left" in capsys.readouterr().out


def test_targets_without_a_verdict_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    held, missed = (Finding("w", "t", "m", each) for each in (True, False))
    search_bench.show([held, missed, Finding("w", "t", "m")])
    assert "1 of 2 targets are held" in capsys.readouterr().out


def test_the_best_of_the_others_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the ratios of the rounds that count; a system that failed is said."""
    monkeypatch.setattr(Crew, "__init__", lambda self: None)

    def side(name: str, kind: Any, seconds: list[float]) -> Found:
        entry = Entry(name, lambda _: None, kind)  # type: ignore[arg-type, return-value]
        made = Side(entry, Crew(), 1.0, None, 7, 7, 0.0, 1.0, [*seconds, 99.0])  # type: ignore[call-arg]
        return made.found(range(len(seconds)))

    ran = [
        side("auto", "own", [1.0, 2.0, 1.0]),
        side("slow", "peer", [3.0, 3.0, 3.0]),
        side("quick", "peer", [2.0, 3.0, 2.0]),
    ]
    found = here._judged("work", ran, "grid 2", {"odd": "broken"}, 2.0)
    assert found.held
    assert found.measured.startswith("2.00x (1.75 to 2.00): auto 1.000 s (grid 2); quick 2.000 s")
    assert found.why == "odd: broken"
    assert not here._judged("work", ran, "grid 2", {}, 2.1).held
    assert seconds_text(0.0125) == "12.50 ms"
