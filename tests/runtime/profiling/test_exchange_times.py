"""Seconds of exchanges: of the usual sizes, and of what programs send at once."""

from __future__ import annotations

import pytest

from weft.runtime.profiling import exchange_times
from weft.runtime.profiling.exchange_times import SIZES, _up_to
from weft.units import NO_BYTES, Bytes


def test_what_programs_send_at_once_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _up_to(NO_BYTES) == _up_to(SIZES[-1]) == SIZES
    assert _up_to(Bytes(10**8)) == (*SIZES, 10**8)
    assert _up_to(Bytes(10**12)) == (*SIZES, exchange_times.MOST)
