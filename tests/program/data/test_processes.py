"""Loaders of real processes: each loads what its rank takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import weft
from on_ranks import passed
from program.data.datasets import SAMPLES, Drawn, plain_losses
from weft.program.data.loader import COMPARED

SCRIPT = Path(__file__).with_name("loads_on_processes.py")
SIZE = 18
# Loads at the begin of an epoch that are compared: each sample twice.
ALIKE = 2 * COMPARED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"), [("data", 3), ("micro", 2), ("stages", 2), ("whole", 2), ("few", 2)]
)
def test_each_process_loads_what_it_takes(layout: str, ranks: int, tmp_path: Path) -> None:
    passed(SCRIPT, ranks, layout, str(tmp_path))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    size, last = (7, True) if layout == "few" else (SIZE, layout == "data")
    epochs = 3 if layout in ("data", "micro") else 2
    expected = plain_losses(weft.Loader(Drawn(), size, shuffle=True, drop_last=not last), epochs)
    for losses, queues, *_ in found:
        assert losses == pytest.approx(expected, rel=1e-12)
        # Each process has a plan of its own.
        assert len(queues) == (ranks if epochs == 3 else 0)
        assert all(each[-2:] == ["load", "copies"] for each in queues)
    loaded = [count for *_, count in found]
    if layout == "data":
        # The last batch of the first epoch has another shape, for which there is no plan yet: each process loads all.
        last = SAMPLES - 2 * SIZE
        own = [len(range(rank, last, ranks)) for rank in range(ranks)]
        assert loaded == [2 * ALIKE + 4 * SIZE // ranks + last + each for each in own]
    elif layout == "micro":
        assert loaded == [2 * (ALIKE + 2 * SIZE // ranks)] * ranks
        assert not set(found[0][2]) & set(found[1][2])
    elif layout == "whole":
        assert loaded == [2 * 2 * SIZE] * ranks
