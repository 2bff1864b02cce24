"""Seconds of updates: as a step finds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.runtime.profiling import call_times
from weft.runtime.profiling.call_times import time_in_turns
from weft.units import Bytes

DEVICE = torch.device("cpu")


def test_updates_find_the_caches_as_a_step_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them as much is read as a step holds."""
    monkeypatch.setattr(call_times, "_ELEMENTS", (2**6, 2**8))
    read: list[Bytes] = []

    def noting(works: Any, order: Any, *rest: Any) -> Any:
        assert list(order) == [0, 1]
        read.append(Bytes(works[0].__self__.nbytes))
        return time_in_turns(works, order, *rest)

    monkeypatch.setattr(call_times, "time_in_turns", noting)
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    found = call_times.measured_updates(optimizer, DEVICE, 0.0, held=Bytes(2**16))
    assert set(read) == {2**16}
    # What starting takes; then target, gradient and two states: seven times four bytes for each element.
    assert [each.bytes for each in found] == [0, 28 * 2**6, 28 * 2**8]
    assert all(each.seconds >= 0 for each in found)
    assert not optimizer.state
