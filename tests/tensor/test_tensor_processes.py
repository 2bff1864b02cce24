"""Global tensors on real processes over Gloo; what each runs stands in global_rank.py."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("global_rank.py")


TOGETHER = [
    *("training", "borders", "dtensors", "diverging"),
    *("diverging_early", "plain", "missing"),
]


@pytest.mark.parametrize(
    ("arguments", "cases"), [([], TOGETHER), (["waits"], ["slow", "crossing"])]
)
def test_two_processes(arguments, cases):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    late = threading.Timer(60, lambda: [process.kill() for process in processes])
    late.start()
    outputs = [process.communicate()[0] for process in processes]
    late.cancel()
    for output in outputs:
        passed = [case for case in cases if f"{case} passed\n" in output]
        assert passed == cases, output
