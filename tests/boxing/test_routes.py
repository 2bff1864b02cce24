"""Routes of transfers and counts of overlaps: those of looking at every rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.boxing import BoxingStep, local_transfer, steps, transfer_ranks
from weft.boxing.overlaps import overlaps
from weft.boxing.transfer import Crossings, missing_elements
from weft.layout import (
    SBP,
    Broadcast,
    Layout,
    Partial,
    Placement,
    Region,
    Split,
    overlap,
    region_size,
    within,
)
from weft.units import Bytes

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
GRIDS = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def sbps(shape: tuple[int, ...], axes: int) -> st.SearchStrategy[tuple[SBP, ...]]:
    every: list[SBP] = [Broadcast(), *map(Split, range(len(shape)))]
    return st.tuples(*[st.sampled_from(every)] * axes)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...]]:
    """Two layouts of a tensor: on the same ranks, on others, or on some in common, in any order."""
    shape = draw(SHAPES)
    one, other = draw(GRIDS), draw(GRIDS)
    ranks = draw(st.permutations(range(prod(one) + prod(other))))
    kept = draw(st.integers(0, prod(one)))
    here = Placement("cpu", one, tuple(ranks[: prod(one)]))
    left = draw(st.permutations(ranks[kept : kept + prod(other)]))
    there = here if draw(st.booleans()) else Placement("cpu", other, tuple(left))
    return (
        Layout(here, draw(sbps(shape, here.axes))),
        Layout(there, draw(sbps(shape, there.axes))),
        shape,
    )


def plain_routes(
    source: Layout, target: Layout, shape: tuple[int, ...]
) -> Iterator[tuple[int, int, Region]]:
    """(sender, receiver, region of the whole tensor) of every piece, receiver by receiver."""
    holders: dict[Region, list[int]] = {}
    for rank in source.placement.ranks:
        holders.setdefault(source.local_ranges(shape, rank), []).append(rank)
    sent = dict.fromkeys(source.placement.ranks, 0)
    for receiver in target.placement.ranks:
        for held, ranks in holders.items():
            region = overlap(held, target.local_ranges(shape, receiver))
            if region_size(region):
                sender = receiver if receiver in ranks else min(ranks, key=sent.__getitem__)
                sent[sender] += region_size(region) * (sender != receiver)
                yield sender, receiver, region


@settings(max_examples=200, deadline=None, derandomize=True)
@given(transfers())
def test_a_rank_has_the_pieces_that_it_has_among_all(
    case: tuple[Layout, Layout, tuple[int, ...]],
) -> None:
    source, target, shape = case
    step = BoxingStep("transfer", -1, source, target, Bytes(0))
    ranks = transfer_ranks(step)
    every = list(plain_routes(source, target, shape))
    for rank in ranks:
        local = local_transfer(step, shape, rank)
        assert local.index == ranks.index(rank)
        assert list(local.sends) == [
            (ranks.index(to), within(region, source.local_ranges(shape, rank)))
            for sender, to, region in every
            if sender == rank
        ]
        assert list(local.receives) == [
            (ranks.index(sender), within(region, target.local_ranges(shape, rank)))
            for sender, to, region in every
            if to == rank
        ]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(transfers())
def test_elements_that_cross_are_those_of_all_ranks(
    case: tuple[Layout, Layout, tuple[int, ...]],
) -> None:
    source, target, shape = case
    crossed = sum(
        region_size(region)
        for sender, receiver, region in plain_routes(source, target, shape)
        if sender != receiver
    )
    assert Crossings(target.placement, (target.sbp,), shape).elements(source) == [crossed]
    if source.placement == target.placement:
        grid = source.placement.shape
        assert missing_elements(source.sbp, target.sbp, grid, shape) == crossed


def test_ranks_whose_shards_are_as_long_are_counted_together() -> None:
    found = overlaps((128, 8), (4096, 512))
    assert found.ranks.sum() == 1024
    assert len(found.ranks) < 128
    uneven = overlaps((3, 2), (7,))
    states = tuple(product((Broadcast(), Split(0)), repeat=2))
    assert uneven.ends(states).held.tolist() == [42, 21, 14, 7]


def test_alike_pairs_of_placements_have_alike_chains() -> None:
    sum_, split = (Partial("sum"), Broadcast()), (Split(0), Split(1))
    chains = []
    for first in (0, 4, 100):
        here, there = (
            Placement("cpu", (2, 2), tuple(range(start, start + 4))) for start in (first, first + 4)
        )
        chain = steps(Layout(here, sum_), Layout(there, split), (6, 4), 4)
        assert {step.source.placement for step in chain} <= {here, there}
        assert chain[0].source == Layout(here, sum_)
        assert chain[-1].target == Layout(there, split)
        chains.append([(s.kind, s.axis, s.source.sbp, s.target.sbp, s.bytes) for s in chain])
    assert chains[0] == chains[1] == chains[2]
