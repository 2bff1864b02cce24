"""A failure of one rank is known to the others, and who asks for a cause does not wait without need."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from weft.runtime.failures.failure_store import FailureStore

pytestmark = pytest.mark.timeout(30)
# More seconds than a test may take.
LONG = 100.0


@pytest.fixture
def boards() -> Iterator[tuple[FailureStore, FailureStore]]:
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    both = FailureStore(store, 0, 2), FailureStore(store, 1, 2)
    yield both
    for board in both:
        board.close()


def test_a_failure_of_another_rank_ends_a_wait_for_the_cause(
    boards: tuple[FailureStore, FailureStore],
) -> None:
    one, other = boards
    other.announce(ValueError("no room"))
    cause = one.cause(LONG)
    assert cause is not None
    assert str(cause) == "rank 0 stopped: rank 1 failed: ValueError: no room"
    assert one.failed


def test_a_rank_that_has_failed_itself_waits_for_no_cause(
    boards: tuple[FailureStore, FailureStore],
) -> None:
    one, _ = boards
    found = []
    asking = threading.Thread(target=lambda: found.append(one.cause(LONG)), daemon=True)
    asking.start()
    one.announce(ValueError("no room"))
    asking.join(LONG)
    assert found == [None]
    assert one.cause(LONG) is None


def test_causes_are_waited_for_again_once_the_job_goes_on(
    boards: tuple[FailureStore, FailureStore],
) -> None:
    one, other = boards
    one.announce(ValueError("no room"))
    assert other.cause(LONG) is not None
    for board in boards:
        board.renew()
    assert not one.failed
    other.announce(ValueError("once more"))
    assert "once more" in str(one.cause(LONG))
