"""A signal to one process ends the loops of all after the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from on_ranks import passed

SCRIPT = Path(__file__).with_name("fits_on_processes.py")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_all_stop_after_the_same_step(workers: int, tmp_path: Path) -> None:
    passed(SCRIPT, 2, str(tmp_path / "run"), str(tmp_path), str(workers))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    steps, why = found[0]
    assert why == "SIGTERM"
    assert [each.name for each in (tmp_path / "run").glob("step-*")] == [f"step-{steps:08d}"]
    # The first process alone has written.
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))
