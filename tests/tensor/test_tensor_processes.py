"""Global tensors on real processes, through shared memory and over Gloo; what each runs stands in global_rank.py."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from pathlib import Path

import pytest

from on_ranks import run_ranks

pytestmark = [pytest.mark.timeout(320), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("global_rank.py")


TOGETHER = [
    *("training", "borders", "dtensors", "diverging"),
    *("diverging_early", "diverging_where_nothing_is_sent", "plain", "parts"),
    *("sparse", "plain_forms", "missing"),
]


@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize(
    ("arguments", "cases"), [([], TOGETHER), (["waits"], ["slow", "crossing"])]
)
def test_two_processes(arguments, cases, transport):
    outputs = [output for output, _ in run_ranks(SCRIPT, 2, *arguments, WEFT_TRANSPORT=transport)]
    for output in outputs:
        passed = [case for case in cases if f"{case} passed\n" in output]
        assert passed == cases, output
