"""Acts that wait for the end of others."""

from __future__ import annotations

from weft.actors.messages import IssueSlot
from weft.runtime.executor.queues import Gate

# Ends stand in the order of actors 1, 3, 2; actor 2 waits for the ends of 1 and 3.
TURNS = (IssueSlot(1, 0, 0, 0), IssueSlot(2, 0, 2, 2), IssueSlot(3, 0, 1, 0))


def test_an_act_begins_when_all_ends_before_it_have_been() -> None:
    gate = Gate(TURNS)
    assert gate.needed
    gate.begin()
    assert gate.opens("comm:0", 1, 0)
    assert not gate.opens("compute", 2, 0)
    assert gate.end(3, 0) == ()  # the end of 1 comes before it
    assert gate.end(1, 0) == ("compute",)
    assert gate.opens("compute", 2, 0)
    assert gate.end(2, 0) == ()


def test_each_step_waits_anew() -> None:
    gate = Gate(TURNS)
    for _ in range(2):
        gate.begin()
        assert not gate.opens("compute", 2, 0)
        assert gate.end(1, 0) == ()
        assert gate.end(3, 0) == ("compute",)
        assert gate.opens("compute", 2, 0)
        gate.end(2, 0)


def test_acts_without_a_turn_wait_for_nothing() -> None:
    gate = Gate((IssueSlot(1, 0, 0, 0),))
    assert not gate.needed
    assert gate.opens("compute", 7, 0)
    assert gate.end(7, 0) == ()
