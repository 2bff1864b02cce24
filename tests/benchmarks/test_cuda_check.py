"""What only a GPU can answer; without one, the program says so."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cuda_check import CHECKS, main


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_the_device_answers_as_expected(name: str) -> None:
    assert CHECKS[name]()


def test_without_a_device_nothing_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 1
    assert "sees no CUDA device" in capsys.readouterr().out
