"""Exchanges of candidates: gradients along the data axis, sums along the tensor axis, and what bounds leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import weft
from search.jobs import begun, decoder, few_samples, layers, many_samples
from search.machines import SLOW, TWO_KINDS
from weft.hardware.topology import Topology
from weft.ir.plan_nodes import CollectiveKind
from weft.planning.stored_step import StoredStep
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.lower_bounds import Exchanges
from weft.search.space import space_of
from weft.units import Bytes

# Bytes of the gradients of both weights of `layers`.
GRADIENTS = 4 * (256 * 256 + 10 * 256)
ALL = ((0, 1, 2, 3),)
PAIRS, APART = ((0, 1), (2, 3)), ((0, 2), (1, 3))
SHARP: Any = {"rel": 1e-9}


def exchanges(
    step: StoredStep | None = None,
    topology: str | Topology = "h100x4",
    base: weft.Strategy = weft.Strategy(),  # noqa: B008 (frozen)
) -> Exchanges:
    return begun(step or layers(), topology, base=base).lower_bounds.exchanges


def reduced(found: Exchanges, *candidates: Candidate, least: bool = False) -> list[float]:
    return list(map(float, found.reduction(CandidateTable.of(candidates), least)))


def added_up(found: Exchanges, *candidates: Candidate, least: bool = False) -> list[float]:
    return list(map(float, found.sums(CandidateTable.of(candidates), least)))


def collective(
    found: Exchanges, kind: CollectiveKind, size: int, groups: tuple[tuple[int, ...], ...]
) -> float:
    """Seconds of one collective, as the machine says."""
    parts = len(groups[0])
    moved = size * (parts - 1) // parts * (2 if kind == "all_reduce" else 1)
    costs = found.facts.machine.costs
    return costs.of_collective(kind, Bytes(size), Bytes(moved), list(groups)).seconds


def test_data_parallel_adds_up_all_gradients_of_weights() -> None:
    found = exchanges()
    whole = collective(found, "all_reduce", GRADIENTS, ALL)
    shards = collective(found, "reduce_scatter", GRADIENTS, ALL)
    expected = [whole, shards, shards, 0.0, 0.0]
    candidates = (
        Candidate(4),
        Candidate(4, zero=1),
        Candidate(4, zero=3),
        Candidate(4, layouts="free"),
        Candidate(1),
    )
    assert shards < whole
    assert reduced(found, *candidates) == pytest.approx(expected, **SHARP)


def test_grids_add_up_parts_between_ranks_that_hold_the_same() -> None:
    """Along the data axis neighbours are as far apart as the tensor axis is long, unless that lies outside."""
    found = exchanges(topology="flexflow-k80x4")
    grid = Candidate(2, 2, layouts="columns")
    apart = collective(found, "all_reduce", GRADIENTS // 2, APART)
    near = collective(found, "all_reduce", GRADIENTS // 2, PAIRS)
    assert reduced(found, grid, replace(grid, outer=True)) == pytest.approx([apart, near], **SHARP)


def test_stages_add_up_their_parts() -> None:
    found = exchanges()
    part = collective(found, "all_reduce", GRADIENTS // 2, PAIRS)
    assert reduced(found, Candidate(2, stages=2)) == pytest.approx([part], **SHARP)


def test_a_sum_behind_a_layer_by_rows_is_added_up_along_the_tensor_axis() -> None:
    """Of the two layers the second makes one of [8, 10]: for each micro-batch, of its samples."""
    found = exchanges()
    line, grid = Candidate(1, 4, layouts="columns"), Candidate(2, 2, layouts="columns")
    split = replace(line, micro_batches=2)
    expected = [
        collective(found, "all_reduce", 320, ALL),
        collective(found, "all_reduce", 160, PAIRS),
        2 * collective(found, "all_reduce", 160, ALL),
    ]
    assert added_up(found, line, grid, split) == pytest.approx(expected, **SHARP)
    assert added_up(found, replace(line, layouts="sequence")) == added_up(found, line)
    assert added_up(found, Candidate(4), Candidate(2, 2, layouts="free")) == [0.0, 0.0]


def test_stages_share_sums() -> None:
    found = exchanges(decoder(8))
    flat = Candidate(1, 2, layouts="columns", micro_batches=2)
    whole, part = added_up(found, flat, replace(flat, stages=2))
    assert part == pytest.approx(whole / 2, **SHARP)


def test_at_least_what_is_around_a_layer_is_gathered_where_it_is_smaller() -> None:
    """Gradients of few samples are larger than what makes them; those of many are not, and travel narrow at least."""
    few, many = exchanges(few_samples(), SLOW), exchanges(many_samples(), SLOW)
    assert reduced(few, Candidate(4), least=True)[0] < 0.1 * reduced(few, Candidate(4))[0]
    least = reduced(many, Candidate(4), least=True)[0]
    assert 0.4 * reduced(many, Candidate(4))[0] < least < reduced(many, Candidate(4))[0]


def test_at_least_weights_are_gathered_where_they_are_smaller_than_sums() -> None:
    candidate = Candidate(1, 4, layouts="columns")
    few, many = exchanges(few_samples(), SLOW), exchanges(many_samples(), SLOW)
    assert added_up(few, candidate, least=True) == added_up(few, candidate)
    assert 0 < added_up(many, candidate, least=True)[0] < added_up(many, candidate)[0]


@pytest.mark.parametrize("step", [few_samples, many_samples], ids=lambda f: f.__name__)
def test_what_no_plan_leaves_out_is_no_more_than_what_most_do(step: Any) -> None:
    found = exchanges(step(), SLOW)
    space = space_of(found.facts, every_rank=True)
    assert (found.reduction(space, least=True) <= found.reduction(space)).all()
    assert (found.sums(space, least=True) <= found.sums(space)).all()


@pytest.mark.parametrize("least", [True, False])
def test_each_point_of_many_has_its_own_seconds(least: bool) -> None:
    """Those of all at once are those of one after the other."""
    found = exchanges(decoder(8))
    space = space_of(found.facts, every_rank=True)
    some = space.where((space.recompute == 0) & (space.offload == 0))
    one_by_one = [
        reduced(found, candidate, least=least) + added_up(found, candidate, least=least)
        for candidate in some
    ]
    at_once = zip(
        reduced(found, *some, least=least), added_up(found, *some, least=least), strict=True
    )
    assert list(map(list, at_once)) == one_by_one


def test_where_the_user_says_how_things_lie_less_is_sure() -> None:
    """A gradient that is split is added up nowhere; with the batch fixed nothing is sure at all."""
    data, cut = Candidate(4), Candidate(1, 4, layouts="columns")
    plain = exchanges()
    split = exchanges(base=weft.Strategy(parameters={"0.weight": weft.split(0)}))
    whole = exchanges(base=weft.Strategy(batch={"*": weft.broadcast}))
    free, part, none = (reduced(each, data, least=True)[0] for each in (plain, split, whole))
    assert free > part > none == 0.0
    assert added_up(plain, cut, least=True)[0] > 0
    assert added_up(split, cut, least=True) == added_up(whole, cut, least=True) == [0.0]
    assert reduced(split, data) == reduced(whole, data) == reduced(plain, data)


def test_of_stages_with_unlike_links_the_quickest_counts_at_least() -> None:
    """It may be the one that has the most to add up."""
    few, many = exchanges(few_samples(), TWO_KINDS), exchanges(many_samples(), TWO_KINDS)
    line = Candidate(1, 2, stages=2, layouts="columns")
    assert added_up(few, line, least=True) < added_up(few, line)
    quick, slow = (collective(many, "all_reduce", 3392, (pair,)) for pair in PAIRS)
    assert quick < slow
    # In two bytes each, half of the elements.
    assert (3 * 32 * 32 + 32 * 10) * 2 / 2 == 3392
    assert reduced(many, Candidate(2, stages=2), least=True) == pytest.approx([quick], **SHARP)


@pytest.mark.parametrize("topology", ["h100x16", "flexflow-k80x8", SLOW, TWO_KINDS])
def test_stages_that_begin_alike_are_alike(topology: str | Topology) -> None:
    """The quickest of all is found among the first of them."""
    found, every = (exchanges(few_samples(), topology) for _ in range(2))
    vars(every)["_node"] = len(every.facts.ranks)
    space = space_of(found.facts, every_rank=True)
    for kind in (Exchanges.reduction, Exchanges.sums):
        assert kind(found, space, True).tolist() == kind(every, space, True).tolist()
    assert found._node == {"h100x16": 8, "flexflow-k80x8": 4}.get(str(topology), found._node)
