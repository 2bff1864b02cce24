"""The virtual clock: time moves only from one event to the next."""

from __future__ import annotations

from weft.actors.simulate import VirtualClock


def test_what_happens_at_one_time_comes_in_the_order_in_which_it_was_told() -> None:
    clock: VirtualClock[str] = VirtualClock()
    assert clock() == 0
    assert not clock.advance()
    assert clock.after(2, "late") == 2
    clock.after(1, "first")
    clock.after(1, "second")
    clock.after(0, "now")
    assert (clock.due(), clock.due()) == (["now"], [])
    assert clock.advance()
    assert (clock(), clock.due()) == (1, ["first", "second"])
    assert clock.after(1, "later") == 2
    assert clock.advance()
    assert (clock.now, clock.due(), clock.advance()) == (2, ["late", "later"], False)
