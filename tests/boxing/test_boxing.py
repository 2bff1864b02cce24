"""Chains of boxing, executed with numpy for many ranks in one process."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxing_values import Array, Locals, counted, gather, recorded_cases, reduce, scatter
from weft.boxing import (
    EXCHANGES,
    BoxingStep,
    LocalStep,
    axis_bytes,
    local_step,
    local_transfer,
    steps,
    transfer_ranks,
)
from weft.errors import LayoutError
from weft.layout import (
    REDUCTIONS,
    SBP,
    Broadcast,
    Layout,
    Partial,
    Placement,
    Region,
    Split,
    neutral,
)

B, S0, S1, P, PMAX = (
    Broadcast(),
    Split(0),
    Split(1),
    Partial(),
    Partial("max"),
)


def execute(chain: tuple[BoxingStep, ...], held: Locals, shape: tuple[int, ...]) -> Locals:
    for step in chain:
        if step.kind == "transfer":
            held = transfer(step, held, shape)
            continue
        parts = {rank: local_step(step, shape, 8, rank) for rank in held}
        held = {rank: run(parts, held, rank) for rank in held}
    return held


def transfer(step: BoxingStep, held: Locals, shape: tuple[int, ...]) -> Locals:
    """What all ranks hold after a transfer, each filling its output from the pieces that the peers send it."""
    parts = {rank: local_transfer(step, shape, rank) for rank in transfer_ranks(step)}
    found: Locals = {}
    for rank, me in parts.items():
        assert me.output_shape == step.target.local_shape(shape, rank)
        found[rank] = np.full(me.output_shape, -1)
        for peer, region in me.receives:
            sender = me.ranks[peer]
            (sent,) = (piece for to, piece in parts[sender].sends if to == me.index)
            found[rank][_slices(region)] = held[sender][_slices(sent)]
    return found


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in region)


def run(parts: dict[int, LocalStep], held: Locals, rank: int) -> Array:
    """What `rank` holds after a step, from the pieces that its peers send it by their own view of the step."""
    me, x = parts[rank], held[rank]
    assert x.shape == me.input_shape
    assert me.ranks[me.index] == rank
    result = _local(me, x) if me.kind not in EXCHANGES else _collective(me, parts, held)
    assert result.shape == me.output_shape
    return result


def _local(me: LocalStep, x: Array) -> Array:
    if me.kind == "slice":
        return np.take(x, range(me.offset, me.offset + me.length), axis=me.dim)
    if me.kind == "pad":
        around = [(0, 0)] * x.ndim
        around[me.dim] = (me.offset, me.length - me.offset - x.shape[me.dim])
        return np.pad(x, around, constant_values=neutral(me.reduction, "int64"))
    if me.kind == "keep_first" and me.index:
        return np.full_like(x, neutral(me.reduction, "int64"))
    return x


def _collective(me: LocalStep, parts: dict[int, LocalStep], held: Locals) -> Array:
    if me.kind == "all_reduce":
        return reduce(me.reduction, [held[peer] for peer in me.ranks])
    if me.kind == "all_gather":
        assert me.sizes == tuple(held[peer].shape[me.dim] for peer in me.ranks)
        return np.concatenate([held[peer] for peer in me.ranks], axis=me.dim)
    received = [_sent(parts[peer], held[peer], me.index) for peer in me.ranks]
    if me.kind == "reduce_scatter":
        return reduce(me.reduction, received)
    assert me.sizes == tuple(piece.shape[me.dim] for piece in received)
    return np.concatenate(received, axis=me.dim)


def _sent(peer: LocalStep, x: Array, to: int) -> Array:
    """The piece that `peer` sends to number `to` of the group."""
    scatters = peer.kind == "reduce_scatter"
    dim, sizes = (peer.dim, peer.sizes) if scatters else (peer.split_dim, peer.split_sizes)
    assert sum(sizes) == x.shape[dim]
    return np.split(x, np.cumsum(sizes)[:-1], axis=dim)[to]


def grid_of(shape: tuple[int, ...]) -> Placement:
    return Placement("cpu", shape, tuple(range(math.prod(shape))))


def test_equals_what_oneflow_recorded_within_one_placement() -> None:
    cases = [case for case in recorded_cases() if case[1].placement == case[2].placement]
    assert len(cases) == 289
    for shape, source, target, expected in cases:
        value = counted(shape)
        held = execute(steps(source, target, shape, 4), scatter(value, source), shape)
        np.testing.assert_array_equal(gather(held, target), value)
        if P not in target.sbp:
            for rank in source.placement.ranks:
                np.testing.assert_array_equal(held[rank], expected[rank])


@st.composite
def transitions(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...]]:
    grid = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    if math.prod(grid) > 12:
        grid = grid[:2]
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    choices = [B, *map(Partial, REDUCTIONS), *(Split(dim) for dim in range(len(shape)))]
    sbps = st.tuples(*(st.sampled_from(choices) for _ in grid))
    return Layout(grid_of(grid), draw(sbps)), Layout(grid_of(grid), draw(sbps)), shape


@settings(max_examples=200, deadline=None, derandomize=True)
@given(transitions())
def test_chain_preserves_the_value(case: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    source, target, shape = case
    value = np.random.default_rng(0).integers(-50, 50, shape)
    chain = steps(source, target, shape, 8)
    held = scatter(value, source)
    np.testing.assert_array_equal(gather(held, source), value)
    np.testing.assert_array_equal(gather(execute(chain, held, shape), target), value)
    ends = [source, *(step.target for step in chain)]
    assert [step.source for step in chain] == ends[:-1]
    assert ends[-1] == target
    for step in chain:
        if step.kind == "transfer":
            continue
        groups = {group[0] for group in source.placement.groups(step.axis)}
        total = sum(local_step(step, shape, 8, first).bytes for first in groups)
        assert total == step.bytes


@pytest.mark.parametrize(("parts", "moved"), [(2, 8192), (4, 12288)])
def test_another_nesting_moves_what_ranks_lack(parts: int, moved: int) -> None:
    """(1 - 1/m) of the tensor, in one step."""
    where = grid_of((parts, parts))
    chain = steps(Layout(where, (B, S0)), Layout(where, (S0, S0)), (64, 64), 4)
    assert [(step.kind, step.bytes) for step in chain] == [("transfer", moved)]


def test_large_gradient_on_a_grid_takes_reduce_scatter_first() -> None:
    where = grid_of((2, 2))
    chain = steps(Layout(where, (P, P)), Layout(where, (B, B)), (1024, 1024), 4)
    assert [step.kind for step in chain] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert sum(step.bytes for step in chain) == 6 * 2**22


def test_small_gradient_on_a_grid_takes_fewer_collectives() -> None:
    where = grid_of((2, 2))
    chain = steps(Layout(where, (P, P)), Layout(where, (B, B)), (4,), 4)
    assert [step.kind for step in chain] == ["all_reduce", "all_reduce"]


TABLE = [  # source, target, kinds, bytes for T = 1280 and p = 4
    (S0, S0, [], 0),
    (S0, S1, ["all_to_all"], 960),
    (S0, B, ["all_gather"], 3840),
    (S0, P, ["pad"], 0),
    (B, S0, ["slice"], 0),
    (B, B, [], 0),
    (B, P, ["keep_first"], 0),
    (B, PMAX, ["reinterpret"], 0),
    (P, S1, ["reduce_scatter"], 3840),
    (P, B, ["all_reduce"], 7680),
    (P, P, [], 0),
    (PMAX, P, ["reduce_scatter", "pad"], 3840),
    (S0, PMAX, ["pad"], 0),
]


@pytest.mark.parametrize(("before", "after", "kinds", "moved"), TABLE)
def test_bytes_of_table_2(before: SBP, after: SBP, kinds: list[str], moved: int) -> None:
    where = grid_of((4,))
    chain = steps(Layout(where, (before,)), Layout(where, (after,)), (8, 40), 4)
    assert [step.kind for step in chain] == kinds
    assert sum(step.bytes for step in chain) == moved == axis_bytes(before, after, 4, 1280)


def test_bytes_are_exact_where_shards_are_uneven() -> None:
    """Of 5 x 7 elements 9 stay where they are; three quarters would be 26.25."""
    where = grid_of((4,))
    (step,) = steps(Layout(where, (S0,)), Layout(where, (S1,)), (5, 7), 4)
    assert (step.kind, step.bytes) == ("all_to_all", 26 * 4)
    assert local_step(step, (5, 7), 4, 0).bytes == 26 * 4
    (step,) = steps(Layout(where, (S0,)), Layout(where, (S1,)), (2, 3), 4)
    assert step.bytes == (6 - 2) * 4


def test_an_axis_of_one_rank_moves_nothing() -> None:
    where = grid_of((1,))
    chain = steps(Layout(where, (P,)), Layout(where, (S0,)), (4,), 4)
    assert [(step.kind, step.bytes) for step in chain] == [("reinterpret", 0)]
    assert axis_bytes(P, B, 1, 100) == 0


def test_bytes_count_every_group() -> None:
    chain = steps(Layout(grid_of((2, 3)), (B, P)), Layout(grid_of((2, 3)), (B, B)), (5,), 4)
    assert [step.bytes for step in chain] == [2 * (2 * 2 * 20)]


def test_split_of_a_missing_dimension_is_refused() -> None:
    with pytest.raises(LayoutError, match="splits dimension 1"):
        steps(Layout(grid_of((2,)), (B,)), Layout(grid_of((2,)), (S1,)), (4,), 4)
