"""Collectives between ranks of a local world against the whole tensor."""

from __future__ import annotations

import threading

import pytest
import torch

from build import value_of
from weft.boxing import overlaps
from weft.errors import InternalError
from weft.ir.plan import Collective, Communicator
from weft.layout import shard_sizes
from weft.runtime.channels import local as local_channel
from weft.runtime.channels.collectives import run_collectives
from weft.runtime.world.world import local_world

pytestmark = pytest.mark.timeout(30)

SIZES = [1, 2, 3, 4]


def run(size, function, ranks=None):
    """`function(channel)` on every rank; results in the order of the ranks."""
    with local_world(size, timeout=10) as world:
        channels = world.connect((Communicator(0, tuple(ranks or range(size))),))
        return world.run(lambda rank: function(channels[rank][0]))


def whole(rows, columns=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, 9, (rows, columns), generator=generator).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("rows", "at_a_time"), [(1, None), (5, None), (8, None), (5, 1), (8, 25)])
def test_gather_and_scatter_of_uneven_and_empty_pieces(size, dim, rows, at_a_time, monkeypatch):
    """In one go, and in slices of as many bytes."""
    if at_a_time:
        monkeypatch.setattr(overlaps, "SLICE", at_a_time)
    tensor = whole(rows)
    sizes = shard_sizes(tensor.shape[dim], size)
    pieces = tensor.split(sizes, dim)

    def work(channel):
        mine = pieces[channel.index]
        gather = Collective("all_gather", 0, value_of(mine), value_of(tensor), dim=dim, sizes=sizes)
        scatter = Collective(
            "reduce_scatter", 0, value_of(tensor), value_of(mine), dim=dim, sizes=sizes
        )
        gathered = run_collectives(channel, (gather, gather), [mine, mine * 2])
        share = tensor * (channel.index + 1)
        return gathered, run_collectives(channel, (scatter,), [share.t().contiguous().t()])

    total = size * (size + 1) // 2
    for index, (gathered, scattered) in enumerate(run(size, work)):
        assert torch.equal(gathered[0], tensor)
        assert torch.equal(gathered[1], tensor * 2)
        assert all(each.is_contiguous() for each in gathered)
        assert torch.equal(scattered[0], pieces[index] * total)


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_turns_rows_into_columns(size):
    tensor = whole(5, 7)
    sizes, columns = shard_sizes(5, size), shard_sizes(7, size)

    def work(channel):
        mine = tensor.split(sizes, 0)[channel.index]
        out = tensor.split(columns, 1)[channel.index]
        turn = Collective(
            "all_to_all",
            0,
            value_of(mine),
            value_of(out),
            dim=0,
            split_dim=1,
            sizes=sizes,
            split_sizes=columns,
        )
        return run_collectives(channel, (turn,), [mine])[0]

    for index, out in enumerate(run(size, work)):
        assert torch.equal(out, tensor.split(columns, 1)[index])


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_reduce_joins_tensors_of_one_dtype(dtype, reduction):
    tensors = [whole(2, dtype=dtype), whole(3, 1)[0, 0].to(dtype), whole(4).t()]

    def work(channel):
        collectives = [
            Collective("all_reduce", 0, value_of(each), value_of(each), reduction=reduction)
            for each in tensors
        ]
        return run_collectives(channel, collectives, [each + channel.index for each in tensors])

    for outs in run(3, work):
        for tensor, out in zip(tensors, outs, strict=True):
            expected = {"sum": tensor * 3 + 3, "max": tensor + 2, "min": tensor}[reduction]
            assert torch.equal(out, expected)
            assert out.dtype == tensor.dtype


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", [0, 1, 1]), ("max", [0, 1, 1]), ("min", [0, 0, 1])]
)
def test_all_reduce_of_booleans(reduction, expected):
    tensors = torch.tensor([[False, True, True], [False, False, True]])
    spec = Collective(
        "all_reduce", 0, value_of(tensors[0]), value_of(tensors[0]), reduction=reduction
    )
    for (out,) in run(
        2, lambda channel: run_collectives(channel, (spec,), [tensors[channel.index]])
    ):
        assert out.dtype == torch.bool
        assert out.tolist() == expected


def test_outputs_share_no_memory_with_inputs_or_other_ranks():
    tensor = torch.ones(4)
    spec = Collective("all_gather", 0, value_of(tensor), value_of(tensor), dim=0, sizes=(4,))
    (out,) = run(1, lambda channel: run_collectives(channel, (spec,), [tensor]))[0]
    out.zero_()
    assert tensor.all()
    spec = Collective("all_reduce", 0, value_of(tensor), value_of(tensor))
    outs = run(2, lambda channel: run_collectives(channel, (spec,), [tensor])[0])
    outs[0].zero_()
    assert outs[1].tolist() == [2] * 4
    assert tensor.all()


def test_the_order_of_a_communicator_is_its_own():
    tensor = whole(5)
    sizes = shard_sizes(5, 2)

    def work(channel):
        mine = tensor.split(sizes)[channel.index]
        gather = Collective("all_gather", 0, value_of(mine), value_of(tensor), dim=0, sizes=sizes)
        assert channel.ranks[channel.index] == channel.rank
        return run_collectives(channel, (gather,), (mine,))[0]

    assert all(torch.equal(out, tensor) for out in run(2, work, ranks=(1, 0)))


def test_broadcast_barrier_and_texts():
    def work(channel):
        channel.barrier()
        mine = torch.full((2, 2), channel.index)
        return channel.broadcast(mine, 2).tolist(), channel.exchange_text("é" * channel.index)

    assert run(3, work) == [([[2, 2], [2, 2]], ["", "é", "éé"])] * 3


def test_ranks_that_run_different_collectives_are_told():
    def work(channel):
        if channel.index:
            return channel.barrier()
        return channel.broadcast(torch.ones(1), 0)

    with pytest.raises(InternalError, match="different collectives"):
        run(2, work)


def test_no_rank_leaves_before_its_tensors_are_read(monkeypatch):
    """Rank 0 overwrites what it sent as soon as it may; rank 1 gives it time to do so too early."""
    left = threading.Event()
    check = local_channel._check_piece

    def slow(rank, buffer, tensor):
        if rank == 0:
            left.wait(0.2)
        check(rank, buffer, tensor)

    monkeypatch.setattr(local_channel, "_check_piece", slow)

    def work(channel):
        mine = torch.full((2,), channel.index + 1)
        spec = Collective("all_gather", 0, value_of(mine), value_of(mine), dim=0, sizes=(2, 2))
        (out,) = run_collectives(channel, (spec,), (mine,))
        mine.zero_()
        left.set()
        return out.tolist()

    assert run(2, work) == [[1, 1, 2, 2]] * 2


@pytest.mark.parametrize("size", SIZES)
def test_an_all_reduce_writes_over_what_it_may(size):
    """Where the input is given away and contiguous, the result takes its place; elsewhere it is a copy."""
    tensor = whole(5)
    spec = Collective("all_reduce", 0, value_of(tensor), value_of(tensor), in_place=True)

    def work(channel):
        own, turned = tensor.clone(), tensor.t().contiguous().t()
        (out,) = run_collectives(channel, (spec,), [own])
        (copy,) = run_collectives(channel, (spec,), [turned])
        return out is own, torch.equal(out, tensor * size), torch.equal(turned, tensor), copy

    for same, right, kept, copy in run(size, work):
        assert same
        assert right
        assert kept
        assert torch.equal(copy, tensor * size)
