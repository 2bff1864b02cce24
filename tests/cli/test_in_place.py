"""`weft.elastic` under `weft run --restarts`: ranks that are left go on in their processes, with the losses of a run
that nothing has disturbed; and where they cannot, all start again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from program.data.datasets import Drawn, plain_losses

SCRIPT = Path(__file__).with_name("goes_on_ranks.py")
SIZE = 12


def run(folder: Path, ranks: int, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """What the launcher says of a run that ends well, with all losses as they should be."""
    command = [sys.executable, "-m", "weft", "run", "-n", str(ranks), "--restarts", "3", *options]
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not Path((folder / "memory").read_text()).exists()
    found = rows(folder)
    losses = {step: loss for *_, step, loss in found}
    # One, and the one that was under way, which the first rank may have told of, for each loss.
    assert len(found) - len(losses) <= 2 * found[-1][0]
    batches = weft.Loader(Drawn(), SIZE, shuffle=True, drop_last=True)
    assert losses == pytest.approx(dict(enumerate(plain_losses(batches, 2), 1)), rel=1e-12)
    return done.stderr


def rows(folder: Path) -> list[tuple[int, int, int, int, float]]:
    """Start, size, process, step and loss of the steps that the first rank told of."""
    return [tuple(json.loads(line)) for line in (folder / "losses").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_ranks_that_are_left_go_on(tmp_path: Path) -> None:
    """Without the first one, whose place another takes; the second loss leaves one alone."""
    said = run(tmp_path, 3, "0", "twice", options=("--min-ranks", "1"))
    assert "rank 0" in said
    assert "was ended by signal 9 (SIGKILL)" in said
    assert "restart 1 of 3, in place, on 2 ranks" in said
    assert "restart 2 of 3, in place, on 1 rank\n" in said
    found = rows(tmp_path)
    assert {(start, size) for start, size, *_ in found} == {(0, 3), (1, 2), (2, 1)}
    processes = {start: process for start, _, process, *_ in found}
    assert processes[0] != processes[1] == processes[2]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(250)
@pytest.mark.parametrize(("how", "said"), [("kill", "SIGKILL"), ("stop", "SIGSTOP")])
def test_a_new_process_is_taken_in(how: str, said: str, tmp_path: Path) -> None:
    text = run(tmp_path, 2, "1", how, options=("--timeout", "3"))
    assert said in text
    assert "restart 1 of 3, in place, on 2 ranks" in text
    found = rows(tmp_path)
    assert {(start, size) for start, size, *_ in found} == {(0, 2), (1, 2)}
    assert len({process for _, _, process, *_ in found}) == 1


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(250)
@pytest.mark.parametrize("how", [("raise",), ("kill", "global")])
def test_all_start_again_where_ranks_cannot_go_on(how: tuple[str, ...], tmp_path: Path) -> None:
    """After a failure of a rank's own; where the model cannot be had any more."""
    text = run(tmp_path, 2, "1", *how)
    number = len(how)
    assert f"restart {number} of 3, on 2 ranks" in text
    assert ("make the model in the function" in text) == (number == 2)
    assert ("ValueError: a failure of its own" in text) == (number == 1)
    assert len({process for _, _, process, *_ in rows(tmp_path)}) == 2
