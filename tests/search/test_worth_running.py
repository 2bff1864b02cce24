"""Which of the strategies that were tried run for real."""

from __future__ import annotations

import weft
from weft.search.result import Outcome, Tried, worth_running
from weft.units import Bytes, Seconds


def _tried(seconds: float, by_hand: bool = False, **entries: object) -> Tried:
    outcome: Outcome = "best" if seconds == 1.0 else "slower"
    strategy = weft.Strategy(**entries)  # type: ignore[arg-type]
    return Tried("", strategy, outcome, Seconds(seconds), Bytes(1), "", by_hand)


NEAR = [
    _tried(1.0 + 0.1 * number, grid=(2,), stages=2, micro_batches=4, recompute=(f"layer{number}",))
    for number in range(6)
]
FLAT = _tried(1.25, grid=(2,), zero=weft.Zero(1))
HAND = _tried(2.0, by_hand=True, grid=(2,))
OTHER = _tried(3.0, grid=(2,), stages=2, micro_batches=8)


def _all() -> list[Tried]:
    return sorted([*NEAR, FLAT, HAND, OTHER], key=lambda each: each.seconds or 0.0)


def test_half_are_the_quickest_and_half_of_other_outlines() -> None:
    """A search's best strategies are alike; what people write and other pipelines run beside them."""
    quickest = [NEAR[0], NEAR[1], NEAR[2], FLAT]
    others = [HAND, OTHER]
    found = worth_running(_all(), 6)
    assert sorted(map(str, found)) == sorted(str(each.strategy) for each in (*quickest, *others))
    assert found[0] == NEAR[0].strategy


def test_the_best_by_hand_is_the_second_to_run() -> None:
    """Of two strategies, one is what people write."""
    assert worth_running(_all(), 2) == [NEAR[0].strategy, HAND.strategy]
    assert worth_running(_all(), 1) == [NEAR[0].strategy]


def test_only_what_fits_runs() -> None:
    """Strategies without room, or refused, are none to run; fewer than asked for come back then."""
    full = Tried("", weft.Strategy(grid=(4,)), "does not fit", Seconds(0.5), Bytes(9), "", True)
    refused = Tried("", weft.Strategy(grid=(8,)), "refused", None, None, "why", True)
    found = worth_running([*_all()[:1], full, refused], 6)
    assert found == [NEAR[0].strategy]


def test_strategies_that_split_other_parameters_run_before_other_outlines() -> None:
    """The quickest of each that should not be far slower; a simulation errs about all that split the same."""
    tables, experts = (
        _tried(1.2, parameters={"t": weft.split(0)}),
        _tried(1.24, parameters={"e": weft.split(0)}),
    )
    again = _tried(1.22, parameters={"t": weft.split(0)}, micro_batches=2)
    slow = _tried(1.3, parameters={"s": weft.split(0)})
    every = sorted([*_all(), tables, experts, again, slow], key=lambda each: each.seconds or 0.0)
    found = worth_running(every, 6, split=lambda each: tuple(each.parameters))
    wanted = [*NEAR[:2], tables, experts, HAND]
    assert all(each.strategy in found for each in wanted)
    assert again.strategy not in found
    assert slow.strategy not in found


def _split(zero: weft.Zero | None = None, **entries: object) -> weft.Strategy:
    parameters = {"head.weight": weft.split(0), "*": weft.broadcast}
    return weft.Strategy(grid=(2,), parameters=parameters, zero=zero, **entries)  # type: ignore[arg-type]


def _found(*strategies: weft.Strategy, outcome: Outcome = "slower") -> list[Tried]:
    first = [Tried("", strategies[0], "best", Seconds(1.0), Bytes(1))]
    return first + [
        Tried("", each, outcome, Seconds(1.1 + number), Bytes(1))
        for number, each in enumerate(strategies[1:])
    ]


def test_the_layouts_of_the_quickest_run_bare_too() -> None:
    """Without micro-batches and ZeRO, whose costs beside calls a simulation may miss, although nobody planned that."""
    best = _split(weft.Zero(1), micro_batches=2)
    alike = [_split(weft.Zero(1), micro_batches=2, clip_norm=float(n)) for n in range(1, 6)]
    asked: list[weft.Strategy] = []

    def fits(each: weft.Strategy) -> bool:
        asked.append(each)
        return True

    found = worth_running(_found(best, *alike), 4, fits=fits)
    assert len(found) == 4
    assert found[-1] == _split()
    assert asked == [_split()]
    assert worth_running(_found(best, *alike), 2) == [best, alike[0]]
    # Where they have no room, others run in their place.
    assert worth_running(_found(best, *alike), 4, fits=lambda _: False) == [best, *alike[:3]]


def test_bare_layouts_of_one_fixed_stage_run_too() -> None:
    best = _split(weft.Zero(1), micro_batches=2, stages=1)
    found = worth_running(_found(best), 4, weft.Strategy(stages=1))
    assert found == [best, _split(stages=1)]


def test_patterns_in_another_order_are_another_strategy() -> None:
    best = _split(weft.Zero(1))
    parameters = {"*": weft.broadcast, "head.weight": weft.split(0)}
    other = weft.Strategy(grid=(2,), parameters=parameters)  # type: ignore[arg-type]
    assert other == _split()
    assert str(worth_running(_found(best, other), 4)[-1]) == str(_split())


def test_bare_layouts_run_beside_pipelines_too() -> None:
    found = _found(NEAR[0].strategy, _split(weft.Zero(1), micro_batches=2))
    assert worth_running(found, 4)[-1] == _split()


def test_of_three_one_is_the_quickest_one_by_hand_one_bare() -> None:
    best = _split(weft.Zero(1), micro_batches=2)
    found = _found(best, _split(weft.Zero(1), micro_batches=4))
    found = [*found, Tried("", HAND.strategy, "slower", Seconds(9.0), Bytes(1), "", True)]
    assert worth_running(found, 3) == [best, HAND.strategy, _split()]


def test_what_is_fixed_is_not_taken_away() -> None:
    best = _split(weft.Zero(1), micro_batches=2)
    fixed = weft.Strategy(zero=weft.Zero(1))
    assert worth_running(_found(best, HAND.strategy), 4, fixed)[-1] == _split(weft.Zero(1))


def test_bare_layouts_that_have_no_room_do_not_run() -> None:
    best = _split(weft.Zero(1), micro_batches=2)
    assert worth_running(_found(best, _split(), outcome="does not fit"), 4) == [best]
    assert worth_running(_found(best, _split()), 4) == [best, _split()]
    assert worth_running(_found(_split()), 4) == [_split()]


def test_of_equal_plans_one_runs() -> None:
    """Layouts that say nothing new take as long and hold as much, to the last digit."""
    best, other = weft.Strategy(grid=(2,)), _tried(1.5, grid=(1, 2))
    same = Tried("", weft.Strategy(grid=(2, 1)), "slower", Seconds(1.0), Bytes(1), "", True)
    found = [Tried("", best, "best", Seconds(1.0), Bytes(1)), same, other]
    assert worth_running(found, 6) == [best, other.strategy]
