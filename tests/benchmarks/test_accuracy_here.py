"""Which cases are predicted and run on this machine."""

from __future__ import annotations

import sys

import pytest

from benchmarks.accuracy_here import bench_cases, main
from benchmarks.pairs import PAIRS


def test_every_pair_of_the_benchmarks_is_a_case_on_its_own_ranks() -> None:
    pairs = {(p.work, p.strategy, p.link, 1 if p.strategy == "single" else p.ranks) for p in PAIRS}
    assert {(c.work, c.strategy, c.link, c.ranks) for c in bench_cases()} == pairs
    assert {ranks for *_, ranks in pairs} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ([], ["mlp3 x1 on 3/data_parallel"]),
        (["--bench"], [pair.name for pair in PAIRS]),
        (["--ranks", "1", "2"], []),
    ],
)
def test_cases_are_listed(
    options: list[str],
    listed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A work that is made for 3 ranks is a case on these alone."""
    works = [] if "--bench" in options else ["--works", "mlp3"]
    monkeypatch.setattr(sys, "argv", ["accuracy_here", "--list", *works, *options])
    main()
    *lines, count = capsys.readouterr().out.split("\n")[:-1]
    assert count == f"{len(listed)} cases"
    assert len(lines) == max(1, len(listed))
