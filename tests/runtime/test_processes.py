"""Ranks as real processes over Gloo; what each runs stands in rank_script.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("rank_script.py")


def run_ranks(case, size, seconds=40):
    """Start `size` processes and return (exit code, output) of each; none outlives `seconds`.

    This process holds the job's store, as torchrun's agent does, on a port that the system chose.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    variables = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(SCRIPT), case],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    late = threading.Timer(seconds, lambda: [_abort(process) for process in processes])
    late.start()
    try:
        return [(process.communicate()[0], process.returncode) for process in processes]
    finally:
        late.cancel()


def _abort(process):
    """End a process that hangs; its output then shows where."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)


def test_every_collective():
    for output, code in run_ranks("collectives", 3):
        assert output.endswith("done\n"), output
        assert code == 0


def test_a_pipeline_of_micro_batches():
    for output, code in run_ranks("micro_batches", 2):
        assert output.endswith("done\n"), output
        assert code == 0


def test_a_failing_rank_ends_all_with_the_first_error():
    """Well before the time-out of 60 s, which would end the processes of this test with an error."""
    (first, _), (second, _) = run_ranks("failing", 2)
    assert first.startswith("rank 0 says: rank 0"), first
    assert "rank 1 failed: RuntimeError: Expected a proper Tensor" in first
    assert "rank 1 says: rank 1: Compute 1 on compute (aten.add.Tensor) failed in step 1" in second


def test_a_rank_that_dies_is_noticed():
    (first, code), (second, died) = run_ranks("dying", 2)
    assert (code, died) == (0, 3), first + second
    assert "with ranks [1] failed, so one of them died" in first
