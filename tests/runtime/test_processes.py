"""Ranks as real processes, through shared memory and over Gloo; what each runs stands in rank_script.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from on_ranks import run_ranks

pytestmark = [pytest.mark.timeout(320), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("rank_script.py")
TRANSPORTS = pytest.mark.parametrize("transport", ["shared", "gloo"])


@TRANSPORTS
def test_every_collective(transport):
    """This process holds the job's store, as torchrun's agent does, on a port that the system chose."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    agent["WEFT_TRANSPORT"] = transport
    for output, code in run_ranks(SCRIPT, 3, "collectives", MASTER_PORT=str(store.port), **agent):
        assert output.endswith("done\n"), output
        assert code == 0


@TRANSPORTS
def test_a_pipeline_of_micro_batches(transport):
    for output, code in run_ranks(SCRIPT, 2, "micro_batches", WEFT_TRANSPORT=transport):
        assert output.endswith("done\n"), output
        assert code == 0


def test_a_failing_rank_ends_all_with_the_first_error():
    """Well before the time-out of 60 s, which would end the processes of this test with an error."""
    (first, _), (second, _) = run_ranks(SCRIPT, 2, "failing")
    assert first.startswith("rank 0 says: rank 0"), first
    assert "rank 1 failed: RuntimeError: Expected a proper Tensor" in first
    assert "rank 1 says: rank 1: Compute 1 on compute (aten.add.Tensor) failed in step 1" in second


def test_a_rank_that_dies_is_noticed():
    (first, code), (second, died) = run_ranks(SCRIPT, 2, "dying")
    assert (code, died) == (0, 3), first + second
    assert "with ranks [1] failed, so a peer died" in first
