"""Processes end a world whose ranks do not go on together, and meet in a new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from on_ranks import passed

SCRIPT = Path(__file__).with_name("ends_on_processes.py")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_gives_up_and_meets_the_other_one_anew(tmp_path: Path) -> None:
    passed(SCRIPT, 2, folder=tmp_path, seconds=60, WEFT_TIMEOUT="10")
