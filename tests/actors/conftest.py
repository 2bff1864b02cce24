"""Machines of these tests, which are small, check themselves after every event."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.actors.invariants import VARIABLE


@pytest.fixture(autouse=True, scope="module")
def checks_after_every_event() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "every")
        yield
