"""The plan of the way of a batch to its step: its text is read back, and its credits say how far ahead it goes."""

from __future__ import annotations

import itertools

import pytest

from weft.actors import Act, RankDriver
from weft.errors import InternalError
from weft.ir.parse import parse_plan
from weft.ir.plan import COMPUTE, Plan
from weft.program.data.feed import LoadedLeaf
from weft.program.data.loading import COPIES, LOAD, loading_plan

LEAVES = [
    LoadedLeaf(
        *("x", "x", (8, 3), "float32"),
        {0: ((0, 4), (0, 3)), 1: ((4, 4), (0, 3))},
        {1: "cuda:1"},
    ),
    LoadedLeaf("rank0.x", "rank0.x", (8,), "int64", {0: ((0, 8),)}),
    LoadedLeaf("unread", "unread", (), "bool"),
]

TEXT = """\
plan "loading"
rank 0
register %x : float32[8, 3] batch credits 2 from 0 to [1]
register %rank0.x : int64[8] batch credits 2 from 0 to [1]
register %unread : bool[] batch credits 2 from 0 to [1]
register %rank0.x_ : float32[4, 3] batch credits 1 from 1 to [2]
register %rank1.x : float32[4, 3] batch credits 1 from 1 to [2]
register %rank0.rank0.x : int64[8] batch credits 1 from 1 to [2]
actor 0 on "load" feed "x" %x, "rank0.x" %rank0.x, "unread" %unread
actor 1 on "copies" compute [%x, %rank0.x, %unread] -> [%rank0.x_, %rank1.x, %rank0.rank0.x]
  %rank0.x_ = call weft.part(%x, [[0, 4], [0, 3]]) : float32[4, 3]
  %rank1.x = call weft.part(%x, [[4, 4], [0, 3]], device="cuda:1") : float32[4, 3]
  %rank0.rank0.x = call weft.part(%rank0.x, [[0, 8]]) : int64[8]
actor 2 on "compute" fetch "x of rank 0" %rank0.x_, "x of rank 1" %rank1.x, "rank0.x of rank 0" %rank0.rank0.x
"""


def test_it_prints_as_other_plans_do() -> None:
    plan = Plan("loading", (), (loading_plan(0, LEAVES, 3),))
    assert str(plan) == TEXT
    assert parse_plan(TEXT) == plan


class Idle:
    """Does nothing."""

    def start(self, act: Act) -> bool:
        return True

    def free(self, register: str, version: int) -> None:
        pass


def acts(driver: RankDriver, actor: int) -> int:
    """How often an actor can act, one act behind the other, until it lacks something."""
    for number in itertools.count():
        try:
            driver.run(actor, 0)
        except InternalError:
            return number
    raise AssertionError


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("leaves", [LEAVES, []], ids=["leaves", "none"])
def test_credits_say_how_far_ahead(leaves: list[LoadedLeaf], ahead: int) -> None:
    """Steps begin without end; what waits for its step is never more than the credits, and each step gives one back."""
    plan = loading_plan(0, leaves, ahead)
    (step,) = plan.on_queue[COMPUTE]
    copies = plan.on_queue.get(COPIES, [])
    driver = RankDriver(plan, Idle())
    for number in range(20):
        driver.begin(number)
    loaded = copied = 0
    for made in range(4):
        for _ in range(3):
            loaded += acts(driver, plan.on_queue[LOAD][0].id)
            copied += sum(acts(driver, each.id) for each in copies)
        assert (loaded, copied) == (made + ahead, made + 1 if copies else 0)
        driver.run(step.id, 0)
