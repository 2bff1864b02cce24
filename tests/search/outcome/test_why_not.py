"""The table "why not": of each kind of strategy by hand the best that is known, and how well it is known."""

from __future__ import annotations

import weft
from search.jobs import layers
from weft.search.evaluation.measures import Measures, Refused
from weft.search.outcome.why_not import Sources, kind_of, why_not
from weft.search.space import Point
from weft.units import Bytes, Seconds

BEST = Measures(Seconds(1.0), Bytes(100), Seconds(0.1), Seconds(0.0))


def measures(seconds: float, memory: int = 100, exposed: float = 0.1) -> Measures:
    return Measures(Seconds(seconds), Bytes(memory), Seconds(exposed), Seconds(0.0))


def sources(
    simulated: dict[Point, Measures | Refused], estimated: dict[Point, Measures]
) -> Sources:
    return Sources(
        simulated,
        estimated.get,
        lambda point: Seconds(2.0 if point.zero == 1 else 0.5),
        lambda point: Bytes(500 if point.zero == 3 else 50),
        limit=200,
    )


def test_each_kind_has_the_best_that_is_known() -> None:
    plain, two, grid = Point(4), Point(2), Point(2, 2, layouts="columns")
    pipe = Point(2, stages=2, micro_batches=4, schedule="1f1b")
    shards = [Point(4, zero=level) for level in (1, 2, 3)]
    known = sources(
        {plain: measures(3.0, exposed=2.1), two: measures(2.0), grid: measures(0.5, memory=300)},
        {pipe: measures(1.5, exposed=0.6)},
    )
    found = why_not([plain, two, grid, pipe, *shards], BEST, known)
    assert [(each.kind, each.name, each.known, each.why) for each in found] == [
        ("data parallel", "data 2", "simulated", "1000.000 ms more computing"),
        ("ZeRO 1", "data 4, ZeRO 1", "at least", "no quicker, whatever its plan"),
        ("ZeRO 2", "data 4, ZeRO 2", "at least", "not reached in time"),
        ("ZeRO 3", "data 4, ZeRO 3", "at least", "0.00 GB too much"),
        ("Megatron grid", "data 2, tensor 2", "simulated", "0.00 GB too much"),
        ("1F1B", str(pipe), "estimated", "500.000 ms more exchanges that nothing hides"),
    ]


def test_what_cannot_be_planned_is_known_by_its_floor() -> None:
    point = Point(4, zero=2)
    (found,) = why_not([point], BEST, sources({point: Refused("no rule")}, {}))
    assert (found.known, found.seconds) == ("at least", 0.5)


def test_all_points_by_hand_have_a_kind() -> None:
    schedules = {"gpipe": "GPipe", "1f1b": "1F1B", "zero_bubble": "zero bubble"}
    for schedule, kind in schedules.items():
        assert kind_of(Point(1, stages=2, micro_batches=4, schedule=schedule)) == kind
    assert kind_of(Point(1, 2, layouts="sequence")) == "Megatron grid"


def test_a_search_says_why_not() -> None:
    found = weft.search(layers(), "flexflow-k80x4", moves=6)
    kinds = [each.kind for each in found.why]
    assert kinds[:4] == ["data parallel", "ZeRO 1", "ZeRO 2", "ZeRO 3"]
    assert "why not:" in str(found)
    assert [each["kind"] for each in found.to_json()["why"]] == kinds
    simulated = [each for each in found.why if each.known == "simulated"]
    assert simulated
    assert all(each.seconds >= found.seconds for each in simulated)


def test_one_that_has_room_stands_before_a_quicker_one_that_has_none() -> None:
    quick, fitting = Point(4), Point(2)
    known = sources({quick: measures(1.5, memory=300), fitting: measures(2.0)}, {})
    (found,) = why_not([quick, fitting], BEST, known)
    assert (found.name, found.seconds) == ("data 2", 2.0)
