"""The same checks of boxing on 4 real processes over Gloo, in one job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("boxing_on_processes.py")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_recorded_cases_reductions_and_two_placements() -> None:
    command = [sys.executable, "-m", "weft", "run", "-n", "4", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"rank {rank} checked 744 cases" in done.stdout
