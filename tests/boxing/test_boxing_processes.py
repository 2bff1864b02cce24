"""The same checks of boxing on 4 real processes over Gloo, in one job."""

from __future__ import annotations

from pathlib import Path

import pytest

from on_ranks import passed

SCRIPT = Path(__file__).with_name("boxing_on_processes.py")


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_recorded_cases_reductions_and_two_placements() -> None:
    for rank, output in enumerate(passed(SCRIPT, 4)):
        assert f"rank {rank} checked 744 cases" in output
