"""Text of plans: it parses back to an equal plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import UserError
from weft.ir.parse import parse_plan
from weft.ir.plan import (
    Collective,
    Communicate,
    Communicator,
    Compute,
    Feed,
    Fetch,
    Hold,
    LocalCall,
    LocalInput,
    LocalUpdate,
    LocalValue,
    Plan,
    RankPlan,
    Register,
)


def example_plan() -> Plan:
    x, w, y, z = (LocalValue(name, (4, 2), "float32") for name in "xwyz")
    scalar = LocalValue("loss", (), "float64")
    collectives = (
        Collective("all_reduce", 0, y, z, reduction="max", bytes=64, in_place=True),
        Collective(
            "all_gather", 0, y, LocalValue("g", (8, 2), "float32"), dim=0, sizes=(4, 4), bytes=32
        ),
        Collective("reduce_scatter", 0, y, LocalValue("r", (2, 2), "float32"), dim=0, sizes=(2, 2)),
        Collective("all_to_all", 0, y, y, "sum", 1, 0, (1, 1), (2, 2), 7),
    )
    call = LocalCall.of(
        "aten.two.default", (x.ref, (1, None)), (y, None, scalar), kwargs=(("k", True),)
    )
    actors = (
        Hold(0, ()),
        Feed(1, ("x", "[0].y"), ("x", "y")),
        Compute(
            2, (call, LocalUpdate("SGD", "w", "y", ("s",), 1, "fc.weight")), ("x",), ("y", "w")
        ),
        Communicate(3, collectives, "comm:0"),
        Fetch(4, ("loss",), ("loss",)),
    )
    registers = (
        Register(x, "batch", 1, (2,), 2),
        Register(w, "parameter", 2, (), full=True),
    )
    rank = RankPlan(0, (LocalInput(w, "parameter", "fc.weight"),), actors, registers)
    other = RankPlan(1, (), (Compute(0, (), (), ()),), ())
    return Plan("train", (Communicator(0, (0, 1)),), (rank, other))


def test_text_parses_back_to_an_equal_plan() -> None:
    plan = example_plan()
    assert parse_plan(str(plan)) == plan


def test_a_collective_shows_what_it_moves() -> None:
    assert (
        "  %g = all_gather %y : float32[4, 2] -> float32[8, 2] (comm=0, dim=0, sizes=[4, 4], bytes=32)"
        in str(example_plan()).splitlines()
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("register %x : float32[2] memory credits 1", "expected one of parameter"),
        ('actor 0 on "host" sleep', "expected feed, fetch"),
        ('input %x = gradient "x" : float32[2]', "expected one of parameter"),
        ("%x = all_scatter %y", "expected an input"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(line: str, message: str) -> None:
    with pytest.raises(UserError, match="line 3") as error:
        parse_plan(f'plan "p"\nrank 0\n{line}\n')
    assert message in str(error.value)


def test_a_segment_shows_how_it_runs_only_where_not_just_as_its_nodes() -> None:
    plain = Compute(0, (), ("x",), ("y",), acts=2)
    marked = replace(plain, id=1, copies=("y",), parts=(3, 9), replayed=True)
    plan = Plan("p", (), (RankPlan(0, (), (plain, marked), (), 2),))
    head = 'on "compute" compute [%x] -> [%y] acts 2'
    assert str(plan).splitlines()[2:] == [
        f"actor 0 {head}",
        f"actor 1 {head} copies [%y] parts [3, 9] replayed",
    ]
    assert parse_plan(str(plan)) == plan
