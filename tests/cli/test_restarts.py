"""`weft run --restarts`: after a rank has died the run goes on from its newest checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from program.data.datasets import Drawn, plain_losses

SCRIPT = Path(__file__).with_name("dies_on_ranks.py")
SIZE = 12


def _run(folder: Path, deaths: int, *options: str) -> tuple[int, str, list[list[float]]]:
    command = [sys.executable, "-m", "weft", "run", "-n", "3", *options, str(SCRIPT)]
    done = subprocess.run(
        [*command, str(folder), str(deaths)], capture_output=True, text=True, timeout=200
    )
    lines = (folder / "losses").read_text().splitlines()
    return done.returncode, done.stderr, [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "sizes"), [((), [3, 3, 3]), (("--min-ranks", "2"), [3, 2, 2])])
def test_the_run_goes_on(options: tuple[str, ...], sizes: list[int], tmp_path: Path) -> None:
    """On as many ranks, or on what is left: with the losses of a run that nothing has disturbed."""
    code, said, found = _run(tmp_path, 2, "--restarts", "3", *options)
    assert code == 0, said[-3000:]
    assert "restart 1 of 3" in said
    assert "restart 2 of 3" in said
    assert [{size for start, size, *_ in found if start == n} for n in range(3)] == [
        {size} for size in sizes
    ]
    losses = {int(step): loss for *_, step, loss in found}
    batches = weft.Loader(Drawn(), SIZE, shuffle=True, drop_last=True)
    assert losses == pytest.approx(dict(enumerate(plain_losses(batches, 3), 1)), rel=1e-12)


@pytest.mark.slow
def test_restarts_have_an_end(tmp_path: Path) -> None:
    code, said, _ = _run(tmp_path, 9, "--restarts", "1")
    assert code == 1
    assert said.count("rank 2") == 2
    assert "restart 1 of 1" in said


@pytest.mark.parametrize(
    "options", [("--min-ranks", "2"), ("--restarts", "1", "--min-ranks", "5"), ("--restarts", "-1")]
)
def test_wrong_options(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "weft", "run", "-n", "2", *options, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--min-ranks" in done.stderr or "--restarts" in done.stderr
