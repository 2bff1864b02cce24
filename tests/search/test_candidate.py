"""A candidate: its name, its grid, and the strategy of it."""

from __future__ import annotations

import pytest

import weft
from weft.layout import SBP, broadcast, split
from weft.search.candidate import Candidate, fixed_first, may_be, point_of, row_of
from weft.search.steps.linears import Experts, Linears
from weft.search.steps.repeated import Blocks
from weft.strategy.strategy import Strategy

LINEARS = Linears(("up",), ("down",), {"up": "columns", "down": "rows"})
BLOCKS = Blocks("blocks", 4)
PIPED = Candidate(2, 3, 2, "columns", micro_batches=4, schedule="1f1b", turns=2)


@pytest.mark.parametrize(
    ("candidate", "name", "grid"),
    [
        (Candidate(4), "data 4", (4,)),
        (Candidate(4, layouts="free"), "data 4, free layouts", (4,)),
        (Candidate(2, 3, layouts="free"), "data 2, tensor 3, free layouts", (2, 3)),
        (Candidate(2, 3, layouts="columns"), "data 2, tensor 3", (2, 3)),
        (
            Candidate(2, 3, layouts="sequence", outer=True),
            "data 2, tensor 3 outside, sequence split",
            (3, 2),
        ),
        (
            Candidate(2, stages=2, micro_batches=4, zero=1, recompute=2),
            "data 2, 2 stages computed, 4 micro-batches, ZeRO 1, 2 blocks recomputed",
            (4,),
        ),
        (
            Candidate(2, 3, 2, "columns", schedule="gpipe", offload=4, experts=True),
            "data 2, tensor 3, 2 stages GPipe, experts split, 4 blocks offloaded",
            (4, 3),
        ),
        (PIPED, "data 2, tensor 3, 2 stages in 2 turns 1F1B, 4 micro-batches", (2, 2, 3)),
    ],
    ids=str,
)
def test_it_has_a_name_and_a_grid(candidate: Candidate, name: str, grid: tuple[int, ...]) -> None:
    assert str(candidate) == name
    assert candidate.grid == grid


def of(candidate: Candidate, base: Strategy = Strategy()) -> Strategy:  # noqa: B008 (frozen)
    """The strategy of a candidate."""
    return candidate.strategy(LINEARS, base, BLOCKS, Experts(("experts.up",), 8))


def test_data_parallelism_splits_the_batch_alone() -> None:
    assert of(Candidate(4)) == Strategy(
        batch={"*": split(0)}, parameters={"*": broadcast}, grid=(4,)
    )
    assert of(Candidate(4, layouts="free")) == Strategy(grid=(4,))


@pytest.mark.parametrize("outer", [False, True])
def test_layers_are_cut_along_the_tensor_axis(outer: bool) -> None:
    def laid(data: SBP, tensor: SBP) -> tuple[SBP, SBP]:
        return (tensor, data) if outer else (data, tensor)

    columns = Strategy(
        batch={"*": laid(split(0), broadcast)},
        parameters={
            "up.weight": laid(broadcast, split(0)),
            "up.bias": laid(broadcast, split(0)),
            "down.weight": laid(broadcast, split(1)),
            "down.bias": laid(broadcast, broadcast),
        },
        grid=(3, 2) if outer else (2, 3),
    )
    assert of(Candidate(2, 3, layouts="columns", outer=outer)) == columns
    sequence = of(Candidate(2, 3, layouts="sequence", outer=outer))
    assert sequence.activations == {"down": laid(split(0), split(1))}
    assert sequence.parameters == columns.parameters


def test_ranks_with_several_parts_are_an_axis_of_their_own() -> None:
    found = of(PIPED)
    assert (found.stages, found.micro_batches, found.schedule) == (4, 4, "1f1b")
    assert found.batch == {"*": (broadcast, split(0), broadcast)}
    assert found.parameters["up.weight"] == (broadcast, broadcast, split(0))


def test_shards_lie_along_the_data_axis() -> None:
    for outer, axis in ((False, 0), (True, 1)):
        found = of(Candidate(2, 3, layouts="columns", zero=2, outer=outer))
        assert found.zero == weft.Zero(2, axis)
    assert of(Candidate(2, stages=2, turns=2, zero=1)).zero == weft.Zero(1, 1)


def test_experts_are_split_along_the_data_axis() -> None:
    assert of(Candidate(4, experts=True)).parameters == {"experts.up": split(0), "*": broadcast}
    cut = of(Candidate(2, 3, layouts="columns", experts=True))
    assert cut.parameters["experts.up"] == (split(0), broadcast)


@pytest.mark.parametrize(
    ("count", "paths"),
    [(0, ()), (1, (3,)), (2, (1, 3)), (3, (1, 2, 3)), (4, ("*",))],
)
def test_blocks_that_run_again_are_spread_evenly(count: int, paths: tuple[object, ...]) -> None:
    patterns = tuple(f"blocks.{path}" for path in paths)
    assert of(Candidate(2, recompute=count)).recompute == patterns
    assert of(Candidate(2, offload=count)).offload == patterns


def test_all_that_is_fixed_comes_first() -> None:
    base = Strategy(
        parameters={"up.weight": broadcast},
        zero=weft.Zero(3),
        recompute=("head",),
        clip_norm=1.0,
        precision="bf16",
    )
    found = of(Candidate(2, 3, layouts="columns", zero=1, recompute=4), base)
    assert list(found.parameters)[:2] == ["up.weight", "up.bias"]
    assert found.parameters["up.weight"] == broadcast
    assert (found.zero, found.clip_norm) == (weft.Zero(3), 1.0)
    assert found.precision == base.precision
    assert found.recompute == ("head", "blocks.*")
    assert list(fixed_first({"b": 1}, {"a": 2, "b": 3}).items()) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize(
    "candidate", [PIPED, Candidate(4, zero=3, outer=True, offload=2, experts=True)]
)
def test_numbers_of_a_point_are_the_point(candidate: Candidate) -> None:
    assert point_of(list(row_of(candidate))) == candidate


@pytest.mark.parametrize(
    ("name", "least"),
    [("data", 1), ("micro_batches", 1), ("turns", 1), ("recompute", 0), ("offload", 0)],
)
def test_counts_are_whole_and_have_a_least(name: str, least: int) -> None:
    assert may_be(name, least)
    assert may_be(name, least + 1)
    for wrong in (least - 1, True, 1.0, "1", None):
        assert not may_be(name, wrong), wrong


def test_choices_are_of_their_type() -> None:
    assert all(may_be("zero", level) for level in range(4))
    assert may_be("outer", False)
    for name, wrong in (
        ("zero", True),
        ("zero", 4),
        ("outer", 0),
        ("schedule", "none"),
        ("experts", 1),
    ):
        assert not may_be(name, wrong), name
