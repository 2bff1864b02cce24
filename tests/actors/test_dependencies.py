"""What an act needs of the others of its step."""

from __future__ import annotations

from build import value
from weft.actors.dependencies import dependencies_in_step
from weft.ir.plan import (
    Collective,
    Communicate,
    Compute,
    LocalInput,
    LocalUpdate,
    LocalValue,
    RankPlan,
    Register,
)

W = LocalInput(LocalValue("w", (4,), "float32"), "parameter", "w")
UPDATE = LocalUpdate("SGD", "w", "g", (), 0, "w")


def gather(id: int) -> Communicate:
    return Communicate(id, (Collective("all_gather", 0, W.value, value("whole")),), "comm:0")


def test_an_update_waits_for_who_reads_the_variable_in_this_step() -> None:
    """Also on another queue: a gather of the old version must be done before the new one is written."""
    actors = (
        gather(0),
        Compute(1, (), ("whole",), ("g",)),
        Compute(2, (UPDATE,), ("g",), ("w",)),
    )
    registers = (
        Register(W.value, "parameter", 2, (0,), full=True),
        Register(value("whole"), "communication", 0, (1,)),
        Register(value("g"), "gradient", 1, (2,)),
    )
    needs = dependencies_in_step(RankPlan(0, (W,), actors, registers))
    assert needs == {(0, 0): (), (1, 0): ((0, 0),), (2, 0): ((1, 0), (0, 0))}


def test_credits_say_how_far_the_maker_may_be_ahead() -> None:
    def needs(credits: int) -> tuple[tuple[int, int], ...]:
        actors = (Compute(0, (), (), ("a",), acts=3), Compute(1, (), ("a",), (), acts=3))
        registers = (Register(value("a"), "activation", 0, (1,), credits=credits, rate=3),)
        return dependencies_in_step(RankPlan(0, (), actors, registers, 3))[0, 2]

    assert needs(1) == ((1, 1),)
    assert needs(2) == ((1, 0),)
    assert needs(3) == ()
