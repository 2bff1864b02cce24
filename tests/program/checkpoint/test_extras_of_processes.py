"""Extras that differ between processes, such as places in their own data: each goes on with its own, or is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from on_ranks import passed

SCRIPT = Path(__file__).with_name("extras_on_processes.py")


def ran(mode: str, size: int, folder: Path) -> list[Any]:
    """What each rank tells."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    passed(SCRIPT, size, mode, str(folder), str(out))
    return [json.loads((out / f"{mode}-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, ran("save", 2, folder)


def test_that_they_differ_is_told_once_by_the_first(saved: tuple[Path, list[Any]]) -> None:
    (warned, _), (other, _) = saved[1]
    assert len(warned) == 1
    assert "the extras of the second, place, random, weft.modules differ between proc" in warned[0]
    assert "continues in 2 processes alone" in warned[0]
    assert other == []


def test_each_process_goes_on_with_its_own(saved: tuple[Path, list[Any]]) -> None:
    first, second = ran("load", 2, saved[0])
    assert first[:2] == [[100, 10, 3, None, None]] * 2
    assert second[:2] == [[101, 11, 3, [4], None]] * 2
    # The first process's score counts.
    assert (first[2], second[2]) == ([100, 10, 3, None, 2.0], [101, 11, 3, [4], 2.0])
    assert first[3] == second[3] == [0, 5, None, None, None]


def test_another_number_of_processes_is_told_which_differ(saved: tuple[Path, list[Any]]) -> None:
    for told in ran("other", 3, saved[0]):
        for error in told:
            assert error.startswith(
                "UserError: program.load: the extras of the second, place, random, weft.modules of"
            )
            assert "between the 2 processes that saved them, and there are 3 now" in error


def test_states_and_options_that_differ_are_told_before_a_checkpoint_counts(
    saved: tuple[Path, list[Any]],
) -> None:
    for _, (state, options) in saved[1]:
        assert "UserError: optimizer.state.inner.weight is " in state
        assert "{'kept': 0}" in state
        assert "{'kept': 1}" in state
        assert "different calls" in options
        assert "options" in options
