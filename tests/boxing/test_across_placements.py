"""Boxing from one placement to another: the cheapest chain, Table 2, who sends what; layouts of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from weft.boxing import BoxingStep, gradient_layout, local_transfer, steps, transfer_ranks
from weft.boxing.overlaps import regions_of
from weft.boxing.path import move_weight, moves
from weft.boxing.transfer import missing_elements
from weft.errors import LayoutError
from weft.layout import (
    SBP,
    Broadcast,
    Layout,
    Partial,
    Placement,
    Split,
    overlap,
    placement,
    region_size,
    shard_region,
)

B, S0, S1, P, PMAX = Broadcast(), Split(0), Split(1), Partial(), Partial("max")
EVERY: tuple[SBP, ...] = (B, S0, S1, P, PMAX)


def transfer_elements(source: Layout, target: Layout, shape: tuple[int, ...]) -> int:
    """Elements that ranks of the target lack, one by one."""

    def elements(layout: Layout, rank: int) -> set[tuple[int, ...]]:
        if rank not in layout.placement.ranks:
            return set()
        ranges = layout.local_ranges(shape, rank)
        return set(product(*(range(at, at + length) for at, length in ranges)))

    return sum(
        len(elements(target, rank) - elements(source, rank)) for rank in target.placement.ranks
    )


def layouts(where: Placement) -> list[Layout]:
    return [Layout(where, sbps) for sbps in product(EVERY, repeat=where.axes)]


def edges(here: Layout, far: list[Layout], shape: tuple[int, ...]) -> Iterator[tuple[Layout, int]]:
    """Everything that one step may do, with what it weighs."""
    where = here.placement
    for kind, _, after, moved in moves(here.sbp, where.shape, shape, 400, EVERY):
        yield Layout(where, after), move_weight(kind, moved)
    for there in far:
        if there != here and not any(isinstance(sbp, Partial) for sbp in (*here.sbp, *there.sbp)):
            elements = transfer_elements(here, there, shape)
            yield there, move_weight("transfer", 400 * elements)


def cheapest(near: Placement, far: Placement, shape: tuple[int, ...]) -> dict[Layout, list[int]]:
    """For every layout of `near`, the least weight to every layout of `far` over all chains of up to 7 steps."""
    ends = layouts(far)
    everything = layouts(near) + (ends if far != near else [])
    out = {
        here: list(edges(here, ends if here.placement == near else [], shape))
        for here in everything
    }
    weights = {here: [0 if here == end else 10**9 for end in ends] for here in everything}
    for _ in range(7):
        for here, nexts in out.items():
            for there, weight in nexts:
                via = (weight + rest for rest in weights[there])
                weights[here] = list(map(min, weights[here], via))
    return weights


@pytest.mark.parametrize("shape", [(4, 16), (3, 5)])
@pytest.mark.parametrize(
    ("near", "far"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        ([0, 1], [2, 3, 4]),
        ([0, 1, 2], [2, 0]),
        ([0, 1, 2, 3], [[2, 3], [0, 1]]),
        ([[0, 1], [2, 3]], [3]),
        ([[0], [1]], [[1, 2]]),
    ],
)
def test_no_chain_is_cheaper(near: list[object], far: list[object], shape: tuple[int, ...]) -> None:
    one, other = placement("cpu", near), placement("cpu", far)
    best = cheapest(one, other, shape)
    for source in layouts(one):
        for number, target in enumerate(layouts(other)):
            chain = steps(source, target, shape, 400)
            weight = sum(move_weight(step.kind, step.bytes) for step in chain)
            assert weight == best[source][number], [step.kind for step in chain]
            assert all(a.target == b.source for a, b in pairwise(chain))


def table_2(source: SBP, target: SBP, p1: int, p2: int, whole: int) -> int:
    """Bytes between disjoint devices (OneFlow, Table 2)."""
    match source, target:
        case Partial(), Broadcast():
            return (p1 + p2 - 1) * whole
        case Partial(), _:
            return p1 * whole
        case _, Broadcast():
            return p2 * whole
    return whole


@pytest.mark.parametrize(("p1", "p2"), [(1, 1), (2, 3), (3, 2), (4, 4), (1, 4), (5, 1)])
@pytest.mark.parametrize("shape", [(7, 5), (120, 60), (2, 3), (0, 4)])
def test_table_2_is_the_upper_bound(p1: int, p2: int, shape: tuple[int, ...]) -> None:
    for source, target in product(EVERY, repeat=2):
        limit = table_2(source, target, p1, p2, 4 * shape[0] * shape[1])
        for first in (p1, p1 - 1, 0):  # disjoint, one rank in common, nested
            one = Layout(Placement("cpu", (p1,), tuple(range(p1))), (source,))
            ranks = tuple(range(first, first + p2))
            other = Layout(Placement("cpu", (p2,), ranks), (target,))
            moved = sum(step.bytes for step in steps(one, other, shape, 4))
            assert moved <= limit, (source, target, first)
            if shape == (120, 60) and first == p1 and not isinstance(source, Partial):
                assert moved == limit


def whole_of(source: Layout, target: Layout, shape: tuple[int, ...]) -> BoxingStep:
    (step,) = steps(source, target, shape, 4)
    return step


def test_what_a_rank_holds_already_does_not_move() -> None:
    source = Layout(placement("cpu", [0, 1, 2, 3]), (S0,))
    target = Layout(placement("cpu", [2, 1, 5]), (S0,))
    step = whole_of(source, target, (6, 4))
    parts = {rank: local_transfer(step, (6, 4), rank) for rank in transfer_ranks(step)}
    assert parts[1].receives == ((1, ((0, 2), (0, 4))),)
    assert parts[1].sends == ((1, ((0, 2), (0, 4))),)
    assert parts[5].input_shape is None
    assert parts[5].receives == ((2, ((0, 1), (0, 4))), (3, ((1, 1), (0, 4))))
    assert parts[0].output_shape is None
    assert step.bytes == 4 * 4 * 4


@pytest.mark.parametrize("shape", [(7, 9), (2, 1), (0, 3), ()])
@pytest.mark.parametrize("before", [(B, B), (S0, B), (B, S0), (S0, S0)])
def test_peers_agree_on_every_piece(shape: tuple[int, ...], before: tuple[SBP, ...]) -> None:
    if not shape:
        before = (B, B)
    source = Layout(placement("cpu", [[0, 1], [2, 3]]), before)
    target = Layout(placement("cpu", [5, 3, 1]), (S0 if shape else B,))
    step = BoxingStep("transfer", -1, source, target, steps(source, target, shape, 4)[0].bytes)
    ranks = transfer_ranks(step)
    parts = [local_transfer(step, shape, rank) for rank in ranks]
    sent = Counter(
        (part.index, peer, tuple(length for _, length in region))
        for part in parts
        for peer, region in part.sends
    )
    received = Counter(
        (peer, part.index, tuple(length for _, length in region))
        for part in parts
        for peer, region in part.receives
    )
    assert sent == received
    crossing = sum(
        region_size(region) for p in parts for peer, region in p.receives if peer != p.index
    )
    assert crossing == transfer_elements(source, target, shape)


@pytest.mark.parametrize("grid", [(4,), (2, 3), (3, 2), (2, 2, 2), (1, 5)])
@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (12, 8), (0, 4)])
def test_regions_of_many_ranks_at_once_are_those_of_each(
    grid: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    whole = [B, *map(Split, range(len(shape)))]
    states = tuple(product(whole, repeat=len(grid)))
    positions = list(product(*map(range, grid)))
    starts, ends = regions_of(states, grid, shape)
    regions = [[shard_region(shape, state, grid, at) for at in positions] for state in states]
    assert [
        [
            tuple((at, end - at) for at, end in zip(*pair, strict=True))
            for pair in zip(*each, strict=True)
        ]
        for each in zip(starts.tolist(), ends.tolist(), strict=True)
    ] == regions
    for (one, held), (other, wanted) in product(zip(states, regions, strict=True), repeat=2):
        missing = sum(
            region_size(need) - region_size(overlap(have, need))
            for have, need in zip(held, wanted, strict=True)
        )
        assert missing_elements(one, other, grid, shape) == missing


def test_senders_share_the_load() -> None:
    source = Layout(placement("cpu", [0, 1, 2]), (B,))
    target = Layout(placement("cpu", [1, 3, 4, 5, 6, 7, 8]), (B,))
    step = whole_of(source, target, (4,))
    loads = [
        sum(peer != index for peer, _ in local_transfer(step, (4,), rank).sends)
        for index, rank in enumerate((0, 1, 2))
    ]
    assert loads == [2, 2, 2]


def test_what_ties_is_cut_evenly() -> None:
    """One sample on two ranks: parts of it cost as many bytes as all of it on one of them, but two ranks send."""
    source = Layout(placement("cpu", [0, 1]), (P,))
    chain = steps(source, Layout(placement("cpu", [2, 3]), (B,)), (1, 8, 4096), 4)
    assert [(step.kind, step.target.sbp) for step in chain] == [
        ("reduce_scatter", (S1,)),
        ("transfer", (B,)),
    ]


def test_other_devices_are_refused() -> None:
    source = Layout(placement("cpu", [0]), (B,))
    with pytest.raises(LayoutError, match="ranks of one device type"):
        steps(source, Layout(placement("cuda", [0]), (B,)), (4,), 4)


def test_layouts_of_gradients() -> None:
    layout = Layout(placement("cpu", [[[0, 1]], [[2, 3]]]), (B, S1, P))
    gradient = gradient_layout(layout)
    assert gradient.sbp == (P, S1, B)
    assert gradient_layout(gradient) == layout
    with pytest.raises(LayoutError, match=r"no gradient passes P\(max\)"):
        gradient_layout(Layout(placement("cpu", [0, 1]), (PMAX,)))
