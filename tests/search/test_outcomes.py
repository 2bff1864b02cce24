"""The table of what was planned, in its order, and why nothing fits."""

from __future__ import annotations

from weft.search.measures import Answer, Measures, Unplannable
from weft.search.result import PlannedStrategy, not_searched, nothing_fits, rows
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds


def measures(seconds: float, memory: int, exposed: float = 0.0, idle: float = 0.0) -> Measures:
    return Measures(Seconds(seconds), Bytes(memory), Seconds(exposed), Seconds(idle))


def planned(
    name: str, micro_batches: int, answer: Answer, by_hand: bool = False
) -> PlannedStrategy:
    return PlannedStrategy(name, Strategy(micro_batches=micro_batches), answer, by_hand)


BEST = planned("best", 1, measures(1.0, 10**9))
EVERY = (
    planned("refused", 5, Unplannable("no such axis")),
    planned("crowded", 4, measures(0.5, 4 * 10**9)),
    planned("waiting", 3, measures(3.0, 10**9, exposed=0.5, idle=1.5), by_hand=True),
    planned("exposed", 2, measures(2.0, 10**9, exposed=1.0)),
    BEST,
)


def keyed() -> dict[str, PlannedStrategy]:
    return {str(each.strategy.micro_batches): each for each in EVERY}


def test_rows_stand_in_the_order_of_what_came_of_them() -> None:
    """The quickest that fit first: the best, slower ones, those without room, those that were refused."""
    found = rows(keyed(), "1", 2 * 10**9)
    assert [(each.name, each.outcome, each.why) for each in found] == [
        ("best", "best", ""),
        ("exposed", "slower", "1000.000 ms more exchanges that nothing hides"),
        ("waiting", "slower", "1500.000 ms more waiting"),
        ("crowded", "does not fit", "2.00 GB too much"),
        ("refused", "refused", "no such axis"),
    ]
    assert [each.strategy.micro_batches for each in found] == [1, 2, 3, 4, 5]
    assert [each.by_hand for each in found] == [False, False, True, False, False]
    assert (found[3].seconds, found[3].memory) == (0.5, 4 * 10**9)
    assert (found[4].seconds, found[4].memory) == (None, None)


def test_all_fit_without_a_limit() -> None:
    quickest = EVERY[1]
    found = rows(keyed(), str(quickest.strategy.micro_batches), None)
    assert [each.name for each in found] == ["crowded", "best", "exposed", "waiting", "refused"]
    assert [each.outcome for each in found][1:4] == ["slower"] * 3


def test_where_nothing_fits_the_least_is_named() -> None:
    told = nothing_fits([*EVERY, planned("small", 6, measures(9.0, 2**29))], 2**20, 7)
    assert "fits 1048576 bytes (1.0 MiB) of memory" in told
    assert "the least that was found is 536870912 bytes (512.0 MiB) (small)" in told
    assert "more time or moves for the 7 that were not reached" in told
    assert "not reached" not in nothing_fits(EVERY, 2**20, 0)


def test_where_all_are_refused_the_first_reason_is_said() -> None:
    two = planned("one", 1, Unplannable("no such axis")), planned("two", 2, Unplannable("no rule"))
    said = "the first is refused so: no such axis"
    assert nothing_fits(two, None, 0).endswith(said)
    assert nothing_fits(two, None, 3).endswith(
        f"{said}; give more time or moves for the 3 that were not reached"
    )
    assert "parameters and states alone take more" in nothing_fits((), 2**20, 3)


def test_micro_batches_are_not_searched_where_each_has_statistics() -> None:
    without, with_them = not_searched(statistics=False), not_searched(statistics=True)
    assert with_them[:-1] == without
    assert "BatchNorm" in with_them[-1]
