"""Ranks that do not do the same are told at once, on real processes: what differs, and where they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

SCRIPT = Path(__file__).with_name("divergent_on_processes.py")


@pytest.fixture(scope="module")
def outcomes() -> Any:
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rates", ["different hyperparameters"]),
        ("updates", ["different hyperparameters", "update=False"]),
        ("other_batch", ["different batches", 'batch="local"', "weft.from_local"]),
        ("one_label", ["different batches"]),
        ("long_batch", ["different batches"]),
        ("skipped", ["step 3 on x", "full_state_dict of program 1", SCRIPT.name]),
        ("other_shape", ["step 3 on x float32[4, 4]", "step 3 on x float32[2, 4]", SCRIPT.name]),
        (
            "two_programs",
            ["step 0 on x float32[4, 4]", "of program 1", "of program 2", SCRIPT.name],
        ),
    ],
)
def test_both_ranks_are_told(outcomes: Any, case: str, words: list[str]) -> None:
    for seconds, error, _ in outcomes[case].values():
        assert all(word in error for word in words), error
        assert seconds < 60  # with compiling; without being told it would be 300


@pytest.mark.timeout(240)
def test_a_rank_that_has_ended_is_told_of(outcomes: Any) -> None:
    _, error, _ = outcomes["state_alone"]["0"]
    assert "ended early" in error
    assert "rank 0 is in full_state_dict of program 1" in error
    assert "rank 1 was last in step 2 on x" in error


@pytest.mark.timeout(240)
def test_each_process_brings_its_own_rows(outcomes: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = torch.randn(10, 4), torch.randn(10, 1)

    def loss(count: int) -> torch.Tensor:
        result: torch.Tensor = (model(x[:count]) - y[:count]).square().mean()
        return result

    for count in (10, 6, 10):
        optimizer.zero_grad()
        loss(count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for _, error, found in outcomes["own_rows"].values():
        assert error == ""
        assert found == pytest.approx(loss(10).item(), rel=1e-5)
