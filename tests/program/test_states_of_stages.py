"""Optimizer states in pipelines of processes: all calls are right where stages have none, and where some come late."""

from __future__ import annotations

from pathlib import Path

import pytest

from on_ranks import passed

SCRIPT = Path(__file__).with_name("states_of_stages_on_processes.py")


@pytest.mark.parametrize("situation", ["head", "body", "tasks", "added", "no gradient", "bare"])
def test_every_call_is_right_on_every_process(situation: str, tmp_path: Path) -> None:
    passed(SCRIPT, 2, str(tmp_path / "saved"), situation, WEFT_TIMEOUT="60")
