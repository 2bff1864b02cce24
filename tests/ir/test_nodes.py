"""Hints say one layout for all axes, or one for each; stages and phases as texts show them."""

from __future__ import annotations

import pytest

from weft.ir.nodes import FORWARD, Hint, Phase
from weft.layout import SBP, broadcast, partial, split

THREE: tuple[SBP | None, ...] = (split(0), None, partial("max"))


def test_one_layout_is_that_of_all_axes() -> None:
    hint = Hint((split(1),), stored=2)
    assert [hint.at(axis) for axis in range(3)] == [split(1)] * 3
    assert hint.with_axis(2, broadcast) == Hint((broadcast,), stored=2)


@pytest.mark.parametrize("axis", range(3))
def test_of_several_axes_one_is_said_anew(axis: int) -> None:
    hint = Hint(THREE, stored=1)
    assert [hint.at(each) for each in range(3)] == list(THREE)
    found = hint.with_axis(axis, broadcast)
    assert (len(found.sbps), found.stored) == (3, 1)
    for each in range(3):
        assert found.at(each) == (broadcast if each == axis else THREE[each])


def test_texts() -> None:
    assert str(Hint(THREE)) == "S(0), *, P(max)"
    assert (str(FORWARD), str(Phase(2, "backward"))) == ("{0 forward}", "{2 backward}")
