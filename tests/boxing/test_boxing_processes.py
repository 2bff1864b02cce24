"""The same checks of boxing on 4 real processes, in one job: through shared memory, and over Gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from on_ranks import passed

SCRIPT = Path(__file__).with_name("boxing_on_processes.py")


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_recorded_cases_reductions_and_two_placements(transport: str) -> None:
    for rank, output in enumerate(passed(SCRIPT, 4, WEFT_TRANSPORT=transport)):
        assert f"rank {rank} checked 744 cases" in output
