"""Ranks as real processes over Gloo; what each runs stands in rank_script.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("rank_script.py")


def run_ranks(case, size, seconds=60):
    """Start `size` processes and return (exit code, output) of each; none outlives `seconds`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(size):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), case],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        return [
            (process.communicate(timeout=seconds)[0], process.returncode) for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective(size):
    for output, code in run_ranks("collectives", size):
        assert output.endswith("done\n"), output
        assert code == 0


def test_a_failing_rank_ends_all_with_the_first_error():
    """Well before the time-out of 60 s, which would end the processes of this test with an error."""
    (first, _), (second, _) = run_ranks("failing", 2, seconds=40)
    assert (
        "rank 0 says: rank 0 stopped: rank 1 failed: RuntimeError: Expected a proper Tensor"
        in first
    )
    assert "rank 1 says: rank 1: Compute 1 on compute (aten.add.Tensor) failed in step 1" in second


def test_a_rank_that_dies_is_noticed():
    (first, code), (_, died) = run_ranks("dying", 2, seconds=40)
    assert (code, died) == (0, 3)
    assert "an exchange with ranks [1] failed, so one of them died" in first
