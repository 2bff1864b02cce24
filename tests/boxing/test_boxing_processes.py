"""The same checks of boxing on 4 real processes, in one job: through shared memory, and over Gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from on_ranks import passed

SCRIPT = Path(__file__).with_name("boxing_on_processes.py")


# The recorded cases that run: all of them only where the test is thorough, as test_boxing_runs.py runs all on threads.
STEP = 12


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    ("transport", "first", "step"),
    [
        ("shared", 0, STEP),
        ("gloo", 2, STEP),
        pytest.param("shared", 0, 1, marks=pytest.mark.thorough),
        pytest.param("gloo", 0, 1, marks=pytest.mark.thorough),
    ],
)
def test_recorded_cases_reductions_and_two_placements(
    transport: str, first: int, step: int
) -> None:
    count = len(range(first, 744, step))
    outputs = passed(SCRIPT, 4, str(first), str(step), WEFT_TRANSPORT=transport)
    for rank, output in enumerate(outputs):
        assert f"rank {rank} checked {count} cases" in output
