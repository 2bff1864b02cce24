"""What one process of the tests with real processes runs: `rank_script.py CASE`, with torchrun's variables set."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from build import value_of
from two_stage_plans import (
    BACK,
    FORTH,
    ROWS,
    WIDTH,
    M,
    first_stage,
    last_stage,
    numbers,
    plain_steps,
)
from weft.errors import RankFailure
from weft.ir.plan import (
    Collective,
    Communicate,
    Communicator,
    Compute,
    Feed,
    Fetch,
    LocalCall,
    LocalInput,
    LocalValue,
    RankPlan,
    Register,
)
from weft.layout import shard_sizes
from weft.runtime.channels.collectives import run_collectives
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.executor.work import Rank
from weft.runtime.memory.state import Variables
from weft.runtime.world.distributed import DistributedWorld

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool)


def whole(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def collectives() -> None:
    """Every collective against the whole tensor, for every dtype, uneven and empty pieces, non-contiguous inputs."""
    world = DistributedWorld("cpu", timeout=20)
    rank, size = world.rank, world.size
    backwards = tuple(reversed(range(size)))
    channels = world.connect((Communicator(0, tuple(range(size))), Communicator(1, backwards)))[
        rank
    ]
    for id, channel in channels.items():
        for dtype in DTYPES:
            for rows in (1, 5, 40000 if dtype == torch.float32 else 3):
                check_channel(channel, id, dtype, rows)
    assert channels[0].exchange_text("é" * rank) == ["é" * other for other in range(size)]
    world.check_same({rank: "same"}, "the plan")
    with pytest.raises(RankFailure, match="differs on ranks"):
        world.check_same({rank: "same" if rank else "other"}, "the plan")
    world.close()


def check_channel(channel, id, dtype, rows) -> None:
    size, index = channel.size, channel.index
    sizes, columns = shard_sizes(rows, size), shard_sizes(3, size)
    tensor = whole(dtype, rows, 3)
    for dim, parts in ((0, sizes), (1, columns)):
        mine = tensor.split(parts, dim)[index]
        gather = Collective(
            "all_gather", id, value_of(mine), value_of(tensor), dim=dim, sizes=parts
        )
        pair = run_collectives(channel, (gather, gather), [mine, mine.t().contiguous().t()])
        assert all(torch.equal(out, tensor) for out in pair)
        share = tensor * (index + 1) if dtype != torch.bool else tensor
        total = tensor * sum(range(1, size + 1)) if dtype != torch.bool else tensor
        scatter = Collective(
            "reduce_scatter", id, value_of(share), value_of(mine), dim=dim, sizes=parts
        )
        assert torch.equal(
            run_collectives(channel, (scatter,), [share])[0], total.split(parts, dim)[index]
        )
    rows_of, columns_of = tensor.split(sizes, 0)[index], tensor.split(columns, 1)[index]
    turn = Collective(
        "all_to_all",
        id,
        value_of(rows_of),
        value_of(columns_of),
        dim=0,
        split_dim=1,
        sizes=sizes,
        split_sizes=columns,
    )
    assert torch.equal(run_collectives(channel, (turn,), [rows_of])[0], columns_of)
    total = Collective("all_reduce", id, value_of(tensor), value_of(tensor))
    scalar = tensor[0, 0]
    most = Collective("all_reduce", id, value_of(scalar), value_of(scalar), reduction="max")
    outs = run_collectives(
        channel,
        (total, most, total),
        [share.t(), scalar + index if dtype != torch.bool else scalar, share],
    )
    assert torch.equal(
        outs[0], (tensor * sum(range(1, size + 1)) if dtype != torch.bool else tensor).t()
    )
    assert outs[1].shape == ()
    assert outs[1] == (scalar + size - 1 if dtype != torch.bool else scalar)
    assert torch.equal(
        channel.broadcast(tensor if index == 1 else torch.zeros_like(tensor), 1), tensor
    )
    channel.barrier()


def pipeline(rank: int, rows: int) -> RankPlan:
    """x -> y = x + x -> all_reduce -> fetch; rank 1 gets a batch on which the addition fails."""
    x, y, z = (LocalValue(name, (rows,), "float32") for name in "xyz")
    call = LocalCall.of("aten.add.Tensor", (x.ref, x.ref), (y,))
    return RankPlan(
        rank,
        (LocalInput(x, "batch", "x"),),
        (
            Feed(0, ("x",), ("x",)),
            Compute(1, (call,), ("x",), ("y",)),
            Communicate(2, (Collective("all_reduce", 0, y, z),), "comm:0"),
            Fetch(3, ("z",), ("z",)),
        ),
        (
            Register(x, "batch", 0, (1,), 2),
            Register(y, "activation", 1, (2,)),
            Register(z, "communication", 2, (3,)),
        ),
    )


def failing() -> None:
    """Step 0 works; in step 1 rank 1's kernel fails; both ranks say so, at once and for the same reason."""
    world = DistributedWorld("cpu", timeout=60)
    rank = world.rank
    channels = world.connect((Communicator(0, (0, 1)),))[rank]
    executor = ThreadExecutor(
        Rank(pipeline(rank, 2), world.device(rank), channels, Variables()), timeout=60
    )
    assert executor.step({"x": torch.ones(2)})["z"].tolist() == [4, 4]
    channels[0].barrier()
    bad = torch.ones(2) if rank == 0 else None
    try:
        executor.step({"x": bad})
    except RankFailure as error:
        sys.stdout.write(f"rank {rank} says: {error}\n")
    else:
        raise AssertionError("the failure went unnoticed")
    executor.close()


def dying() -> None:
    """Rank 1 dies without a word before step 1; rank 0 must not wait for its time-out."""
    world = DistributedWorld("cpu", timeout=60)
    rank = world.rank
    channels = world.connect((Communicator(0, (0, 1)),))[rank]
    executor = ThreadExecutor(
        Rank(pipeline(rank, 2), world.device(rank), channels, Variables()), timeout=60
    )
    executor.step({"x": torch.ones(2)})
    if rank == 1:
        raise SystemExit(3)
    try:
        executor.step({"x": torch.ones(2)})
    except RankFailure as error:
        sys.stdout.write(f"rank {rank} says: {error}\n")


def micro_batches() -> None:
    """A pipeline of two stages and four micro-batches against gradient descent on one device."""
    world = DistributedWorld("cpu", timeout=20)
    rank = world.rank
    channels = world.connect((FORTH, BACK))[rank]
    a, b = numbers(WIDTH, WIDTH, seed=1), numbers(WIDTH, WIDTH, seed=2)
    variables = Variables({"a": a.clone()} if rank == 0 else {"b": b.clone()})
    plan = last_stage(1, backward_first=True) if rank else first_stage(2, backward_first=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(a.clone())], lr=0.01, momentum=0.5)
    batches = [numbers(M, ROWS, WIDTH, seed=step) for step in range(3)]
    with ThreadExecutor(
        Rank(plan, world.device(rank), channels, variables, optimizer=optimizer), timeout=20
    ) as executor:
        found = [executor.step({} if rank else {"x": batch}) for batch in batches]
    expected = plain_steps(batches, a, b)
    if rank:
        losses = [result["loss"] for result in found]
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(variables["b"], b, rtol=1e-12, atol=1e-12)
    else:
        torch.testing.assert_close(variables["a"], a, rtol=1e-12, atol=1e-12)
    world.close()


CASES = {
    "collectives": collectives,
    "failing": failing,
    "dying": dying,
    "micro_batches": micro_batches,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    CASES[sys.argv[1]]()
    sys.stdout.write("done\n")
