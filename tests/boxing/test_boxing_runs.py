"""Boxing run by ranks: what OneFlow recorded, every reduction and dtype, bytes as planned, in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from boxing_runs import (
    DTYPES,
    ChannelOf,
    channels_by_ranks,
    check_gathered,
    check_recorded,
    check_reductions,
    communicators,
)
from boxing_values import counted, gather, recorded_cases, scatter
from two_placements import check_two_placements, rank_plan, two_placements
from weft.boxing import steps
from weft.errors import LayoutError
from weft.ir import Plan, parse_plan
from weft.ir.plan import Communicator
from weft.layout import REDUCTIONS, Broadcast, Layout, Partial, Placement, Split, placement
from weft.runtime.world.world import LocalWorld, local_world
from weft.tensor.boxing import box_groups, run_steps

RANKS = 6


@contextmanager
def connected(
    groups: tuple[Communicator, ...], size: int
) -> Iterator[tuple[LocalWorld, list[ChannelOf]]]:
    with local_world(size, timeout=20) as world:
        channels = world.connect(groups)
        yield world, [channels_by_ranks(groups, channels[rank]) for rank in range(size)]


def test_every_recorded_case_and_its_bytes() -> None:
    cases = recorded_cases()
    assert len(cases) == 744
    with connected(communicators(cases), 4) as (world, channel_of):
        sent = world.run(
            lambda rank: [check_recorded(rank, case, channel_of[rank]) for case in cases]
        )
    check_gathered(sent, cases)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reduction(dtype: str) -> None:
    with connected(communicators([]), 4) as (world, channel_of):
        world.run(lambda rank: check_reductions(rank, dtype, channel_of[rank]))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    grid = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (1, 3), (2, 3), (2, 1, 2)]))
    ranks = draw(st.permutations(range(RANKS)))[: math.prod(grid)]
    return Placement("cpu", grid, tuple(ranks))


@st.composite
def transitions(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    choices = [Broadcast(), *map(Partial, REDUCTIONS), *map(Split, range(len(shape)))]
    ends = []
    for _ in range(2):
        where = draw(placements())
        ends.append(
            Layout(where, draw(st.tuples(*(st.sampled_from(choices) for _ in where.shape))))
        )
    return ends[0], ends[1], shape


@settings(max_examples=80, deadline=None, derandomize=True)
@given(transitions())
def test_there_and_back_is_the_identity(case: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    source, target, shape = case
    value, kind = counted(shape), torch.int64
    held = scatter(value, source)
    ways = ((source, target), (target, source))
    found = dict.fromkeys(group for way in ways for group in box_groups(*way, shape, kind))
    groups = tuple(Communicator(id, ranks) for id, ranks in enumerate(found))
    chain = steps(source, target, shape, 8)

    def work(rank: int, channel_of: ChannelOf) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        mine = torch.from_numpy(held[rank].copy()) if rank in held else None
        there = run_steps(mine, source, target, shape, kind, rank, channel_of)
        return there, run_steps(there, target, source, shape, kind, rank, channel_of)

    with connected(groups, RANKS) as (world, channel_of):
        results = world.run(lambda rank: work(rank, channel_of[rank]))
    there = {rank: t.numpy() for rank, (t, _) in enumerate(results) if t is not None}
    back = {rank: b.numpy() for rank, (_, b) in enumerate(results) if b is not None}
    assert set(there) == set(target.placement.ranks)
    assert (gather(there, target) == value).all(), [step.kind for step in chain]
    assert (gather(back, source) == value).all()


def test_two_placements_run_through_the_whole_chain() -> None:
    for size in (4, 5):
        with local_world(size, timeout=20) as world:
            check_two_placements(world)


def test_a_plan_with_transfers_is_text() -> None:
    graph, groups = two_placements(5)
    plan = Plan("two", groups, tuple(rank_plan(graph, groups, rank) for rank in range(5)))
    text = str(plan)
    assert "= transfer _ : _ -> float64[" in text
    assert "_ = transfer %" in text
    assert parse_plan(text) == plan


def test_a_reduction_that_the_dtype_does_not_take_is_refused() -> None:
    where = placement("cpu", [0, 1])
    source, target = Layout(where, (Partial("xor"),)), Layout(where, (Broadcast(),))
    with pytest.raises(LayoutError, match=r"P\(xor\) of float32 has no meaning: .* sum, max"):
        run_steps(torch.ones(2), source, target, (2,), torch.float32, 0, {}.__getitem__)
