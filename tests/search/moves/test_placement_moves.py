"""Parts of a model on ranks of their own: each move gives plans, the first ones those that should pay."""

from __future__ import annotations

from dataclasses import replace

from search.jobs import begun, decoder, layers
from weft.layout import Placement
from weft.search.measures import Measures
from weft.search.moves.placement_moves import PlacementMoves
from weft.search.moves.stages import StageMoves, share_moves
from weft.strategy.parts import Stage
from weft.strategy.strategy import Strategy, data_parallel

FOUR = replace(data_parallel(), grid=(4,))


def moves(start: Strategy = FOUR) -> tuple[StageMoves, list[Strategy]]:
    found = begun(decoder(), "h100x4")
    stages = StageMoves(found.facts, found.evaluator)
    return stages, [each.on(start) for each in stages.places(start)]


def ranks_of(strategy: Strategy) -> list[tuple[int, ...]]:
    assert not isinstance(strategy.stages, int)
    return [stage.placement.ranks for stage in strategy.stages]


def test_a_part_gets_some_ranks_or_ranks_alone_and_every_move_is_planned() -> None:
    stages, found = moves()
    assert all(isinstance(stages.evaluator.of(each), Measures) for each in found[::8])
    named = {stage.patterns for each in found for stage in each.stages}  # type: ignore[union-attr]
    assert ("tokens",) in named
    shared = [ranks_of(each) for each in found]
    assert [(0,), (0, 1, 2, 3)] in shared
    assert [(0, 2), (0, 1, 2, 3)] in shared
    assert any(set(one).isdisjoint(other) for one, other in (r for r in shared if len(r) == 2))
    assert all({rank for ranks in each for rank in ranks} == {0, 1, 2, 3} for each in shared)


def test_stages_on_ranks_of_their_own_may_have_micro_batches() -> None:
    _, found = moves()
    assert {each.micro_batches for each in found} == {1, 4}
    for each in found:
        one, other = ranks_of(each)
        assert each.micro_batches == 1 or set(one).isdisjoint(other)


def test_the_same_place_in_all_blocks_is_the_first_stage_so_that_it_counts() -> None:
    stages, _ = moves()
    parts = stages.parts
    place = next(each for each in parts.every if each.patterns == ("blocks.*.attention",))
    start = Stage(tuple(parts.units), Placement("cuda", (4,), (0, 1, 2, 3)))
    every = PlacementMoves(replace(parts, every=(place,)), (start,), (1,)).best()
    found = [each.on(FOUR) for each in every]
    placed = [each for each in found if place.patterns in [s.patterns for s in each.stages]]  # type: ignore[union-attr]
    assert placed
    assert all(each.stages[0].patterns == place.patterns for each in placed)  # type: ignore[index]
    assert isinstance(stages.evaluator.of(placed[0]), Measures)


def test_a_large_table_of_few_samples_is_worth_more_than_none() -> None:
    found = begun(layers(), "flexflow-k80x4")
    stages = StageMoves(found.facts, found.evaluator)
    placed = stages.places(FOUR)
    worth = [each.worth for each in placed]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] > 0
    first = placed[0].on(FOUR).stages
    assert not isinstance(first, int)
    assert first[0].patterns == ("0",)


def test_what_is_fixed_has_no_other_places() -> None:
    base = Strategy(grid=(4,))
    found = begun(decoder(), "h100x4", base=base)
    stages = StageMoves(found.facts, found.evaluator)
    assert not stages.places(FOUR)
    assert not stages.borders(replace(FOUR, stages=2))


def staged(*parts: tuple[str, tuple[int, ...]]) -> Strategy:
    stages = [Stage([name], Placement("cuda", (len(own),), own)) for name, own in parts]
    return replace(data_parallel(), stages=stages)


def test_ranks_go_to_the_next_stage_and_stages_are_joined() -> None:
    start = staged(("0", (0, 1, 2, 3)), ("2", (4, 5)))
    found = {move.name: move.on(start) for move in share_moves(start)}
    assert ranks_of(found["1 rows of stage 0 to stage 1"]) == [(0, 1, 2), (3, 4, 5)]
    assert ranks_of(found["2 rows of stage 0 to stage 1"]) == [(0, 1), (2, 3, 4, 5)]
    assert ranks_of(found["1 rows of stage 1 to stage 0"]) == [(0, 1, 2, 3, 4), (5,)]
    one = found["stages 0 and 1 as one"]
    assert one.stages == ()
    assert one.grid == (6,)


def test_a_stage_on_some_ranks_of_another_gets_twice_or_half_as_many() -> None:
    start = staged(("0", (0, 2)), ("2", (0, 1, 2, 3)))
    found = {
        move.name: ranks_of(move.on(start))[0]
        for move in share_moves(start)
        if "on" in move.name and "as one" not in move.name
    }
    assert found == {"stage 0 on 1 rows": (0,), "stage 0 on 4 rows": (0, 1, 2, 3)}
