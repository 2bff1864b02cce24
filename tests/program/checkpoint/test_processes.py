"""Checkpoints of real processes, which see each other's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from on_ranks import run_ranks

SCRIPT = Path(__file__).with_name("saves_on_processes.py")


def _ran(size: int, mode: str, layout: str, folder: Path, out: Path, *more: str) -> list[Any]:
    out.mkdir()
    ended = run_ranks(SCRIPT, size, mode, layout, str(folder), str(out), *more)
    assert [code for _, code in ended] == [0] * size, ended[0][0]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "ranks", "more"),
    [("zero", "stages", 2, ()), ("stages", "zero", 3, ("beside",))],
)
def test_processes_go_on(
    saved: str, loaded: str, ranks: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    before = _ran(2, "save", saved, folder, tmp_path / "before", *more)
    assert all(each == before[0] for each in before)
    after = _ran(ranks, "load", loaded, folder, tmp_path / "after")
    for losses, told, steps in after:
        assert losses == pytest.approx(before[0][0], rel=1e-9)
        assert (told, steps) == ("2", 4)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("beside",)], ids=["at once", "beside"])
def test_one_that_cannot_write_is_told_to_all_and_nothing_is_left(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    found = _ran(2, "save", "data", tmp_path / "saved", tmp_path / "before", *more)
    assert all("No space left on device" in told for _, told, _ in found)
    assert all(steps == 4 for *_, steps in found)
    assert [each.name for each in tmp_path.iterdir()] == ["before"]
