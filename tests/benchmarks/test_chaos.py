"""The faults that are tried, and that a run which is not what it should be is seen."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.__main__ import (
    Expected,
    Fault,
    drawn,
    tried,
    undisturbed,
    untold,
    wrong_with,
)
from benchmarks.chaos.cuts import LENGTHS, drawn_cut
from benchmarks.chaos.training import MOMENTS, STEPS

FAULT = Fault(0, 2, False, 1, "sample", 60, "kill", "cut")


@pytest.fixture(scope="module")
def expected() -> Expected:
    return undisturbed()


def test_faults_are_drawn_by_seed_and_number() -> None:
    every = [drawn(number, 3) for number in range(300)]
    assert every == [drawn(number, 3) for number in range(300)]
    assert every[0] != replace(drawn(0, 4), number=0)
    assert Counter(each.moment for each in every).keys() == MOMENTS.keys()
    assert {"kill", "stop", "hang", "full", "raise"} <= {each.how for each in every}
    assert all(each.rank < each.ranks and 1 <= each.count <= MOMENTS[each.moment] for each in every)
    assert {each.damage for each in every} == {"", "cut", "removed"}


@pytest.mark.slow
def test_a_run_goes_on_after_a_fault(expected: Expected) -> None:
    outcome = tried(FAULT, expected)
    assert outcome.wrong == []
    assert outcome.again >= 1


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(12))
def test_more_faults(number: int, expected: Expected) -> None:
    assert tried(drawn(number, 11), expected).wrong == []


def test_cuts_are_drawn_by_seed_and_number() -> None:
    every = [drawn_cut(number, 3) for number in range(300)]
    assert every == [drawn_cut(number, 3) for number in range(300)]
    assert {each.seconds for each in every} == set(LENGTHS)
    assert {each.host for each in every} == {0, 1, 2}
    assert all(max(each.host, each.rank) < each.hosts for each in every)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and iproute2"
)
@pytest.mark.parametrize("number", range(4))
def test_networks_that_are_cut(number: int, expected: Expected) -> None:
    assert tried(drawn_cut(number, 2), expected).wrong == []


@pytest.mark.parametrize("what", ["loss", "samples", "steps", "code", "hang", ""])
def test_what_is_wrong_is_seen(what: str, expected: Expected, tmp_path: Path) -> None:
    rows: list[list[Any]] = [
        [step + 1, expected.losses[step], expected.samples[step]] for step in range(STEPS)
    ]
    if what == "loss":
        rows[3][1] *= 1 + 1e-6
    if what == "samples":
        rows[3][2] = rows[3][2][:-1]
    if what == "steps":
        del rows[5]
    (tmp_path / "steps").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = {"code": 1, "hang": -1}.get(what, 0)
    found = list(wrong_with(tmp_path, code, "the end", expected, expected.state))
    assert bool(found) == bool(what)
    assert what in "".join(found) or what in ("code", "hang")


def test_what_is_not_named_is_seen() -> None:
    steps = [1, 2, 3, 4, 5, 6, 7, 4, 5, 6]
    said = "rank 1 failed\nrestart 1 of 3\nstep-00000006/shard is damaged"
    assert list(untold(FAULT, "step-00000006", steps, said)) == []
    assert list(untold(FAULT, "step-00000003", steps, said)) == []  # it was not passed over
    found = list(untold(FAULT, "step-00000006", steps, "rank 0 failed\nrestart 1 of 3"))
    assert found == ["rank 1 is not named", "step-00000006 is damaged, and not named"]
