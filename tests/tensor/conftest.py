"""What tests of global tensors share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import weft


@pytest.fixture
def world() -> Iterator[None]:
    """Four ranks as threads."""
    with weft.local_world(4):
        yield
