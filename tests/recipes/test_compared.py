"""Losses beside those of one process: what differs, is missing or comes again is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.harness import Missing, Work, Wrong, compared

EXPECTED = [4.0, 3.0, 2.5, 2.25, 2.0, 1.5, 1.25, 1.0, 0.5]
PAIRS = list(enumerate(EXPECTED, 1))


def test_equal_losses_are_seen() -> None:
    near = [(step, loss * (1 + 1e-6)) for step, loss in PAIRS]
    assert compared(near, EXPECTED) == "9 losses within 4e-06"


def test_what_was_killed_has_each_step_once() -> None:
    assert "started again" in compared(PAIRS, EXPECTED, killed=True)
    with pytest.raises(Wrong, match="expected"):
        compared([*PAIRS[:8], *PAIRS[5:]], EXPECTED, killed=True)


def test_other_losses_are_told() -> None:
    other = [*PAIRS[:3], (4, 2.2503), *PAIRS[4:]]
    with pytest.raises(Wrong, match="step 4 has the loss 2.2503, plain PyTorch 2.25"):
        compared(other, EXPECTED)
    with pytest.raises(Wrong, match="losses of the steps"):
        compared(PAIRS[:-1], EXPECTED)


def test_packages_that_are_not_to_be_installed_are_missing(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="logs.txt; leave --offline out"):
        Work(tmp_path, install=False).python_with("logs")


def test_commands_that_fail_or_hang_are_told(tmp_path: Path) -> None:
    work = Work(tmp_path)
    assert (
        work.run(["sh", "-c", "echo $OMP_NUM_THREADS $MORE"], "said", variables={"MORE": "x"})
        == "1 x\n"
    )
    with pytest.raises(Wrong, match=r"exit codes \[0, 3\]"):
        work.together([["true"], ["sh", "-c", "exit 3"]], "fails")
    with pytest.raises(Wrong, match=r"exit codes \[0, 3\]"):
        work.together([["true"], ["sh", "-c", "exit 3"]], "fails", ends=None)
    with pytest.raises(Wrong, match="not ended after 0 s"):
        work.run(["sleep", "100"], "hangs", seconds=0.01)
