"""What one process of test_tensor_processes.py runs, with torchrun's variables set."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import pickle
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import weft
from weft.errors import LayoutError, RankFailure, UserError
from weft.runtime.failures.failure_store import PATIENCE
from weft.runtime.world import distributed
from weft.runtime.world.distributed import DistributedWorld

PAIR = weft.placement("cpu", [0, 1])
S, B, P = weft.split, weft.broadcast, weft.partial


def start() -> int:
    """The world, with a short time-out; this process's rank."""
    world = DistributedWorld("cpu", timeout=20)
    distributed._lasting_worlds["cpu"] = world
    return world.rank


def training(rank: int) -> None:
    """Ops, boxing and training equal a plain model; the processes' own seeds do not matter."""
    torch.manual_seed(0)
    whole = torch.randn(5, 6, dtype=torch.float64)
    for source in (S(0), S(1), B, P()):
        x = weft.tensor(whole if rank == 0 else whole * 0, placement=PAIR, sbp=source)
        assert x.to_local().shape == x.spec.layout.local_shape((5, 6), rank)
        for target in (S(0), S(1), B, P("max")):
            assert torch.equal(x.to_global(sbp=target).full(), whole)
        torch.testing.assert_close((x @ x.t()).full(), whole @ whole.t())
    across(rank, whole)
    plain, ours = torch.nn.Linear(6, 3).double(), torch.nn.Linear(6, 3).double()
    ours.load_state_dict(plain.state_dict() if rank == 0 else ours.state_dict())
    weft.distribute(ours, PAIR, {"weight": S(0)})
    x = weft.tensor(whole, placement=PAIR, sbp=S(0))
    for model, batch in ((plain, whole), (ours, x)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (model(batch) - 1).pow(2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight.full(), plain.weight)
    torch.testing.assert_close(ours.bias.full(), plain.bias)
    part = torch.full((2,), float(rank + 1), requires_grad=True)
    (weft.from_local(part, placement=PAIR, sbp=P()) * 2).sum().backward()
    assert part.grad.tolist() == [2, 2]
    if rank == 0:  # printing asks nobody
        assert "rank 0 holds tensor" in repr(x)


def across(rank: int, whole: torch.Tensor) -> None:
    """To a placement of one rank and back."""
    x = weft.tensor(whole, placement=PAIR, sbp=S(0), requires_grad=True)
    second = weft.placement("cpu", [1])
    there = (x * 2).to_global(placement=second, sbp=B)
    assert len(there.shards()) == rank
    back = (there * 2).to_global(placement=PAIR, sbp=S(1))
    assert torch.equal(back.full(), whole * 4)
    back.sum().backward()
    assert torch.equal(x.grad.full(), torch.full_like(whole, 4))


def borders(rank: int) -> None:
    """A convolution of images that are split in height."""
    images = torch.arange(2 * 7 * 4.0).view(1, 2, 7, 4)
    weight = torch.arange(2 * 2 * 9.0).view(2, 2, 3, 3)
    x = weft.tensor(images, placement=PAIR, sbp=S(2))
    found = F.conv2d(x, weft.tensor(weight, placement=PAIR, sbp=B), padding=1)
    assert found.sbp == (S(2),)
    assert torch.equal(found.full(), F.conv2d(images, weight, padding=1))


def dtensors(rank: int) -> None:
    """To DTensor and back, on the same memory."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(4, 6)
    for placements, sbp in (([Shard(1)], S(1)), ([Replicate()], B)):
        theirs = distribute_tensor(whole, mesh, placements)
        ours = weft.from_dtensor(theirs)
        assert ours.sbp == (sbp,)
        assert torch.equal(ours.full(), whole)
        assert ours.to_local().data_ptr() == theirs.to_local().data_ptr()
        again = weft.to_dtensor(ours, mesh)
        assert again.placements == tuple(placements)
        assert again.to_local().data_ptr() == theirs.to_local().data_ptr()
        assert torch.equal(again.full_tensor(), whole)
    total = theirs.sum(0) + 0 * rank
    assert torch.equal(weft.from_dtensor(total).full(), whole.sum(0))
    torch.manual_seed(0)
    mesh3 = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])
    assert weft.from_dtensor(mesh3).full().tolist() == [[1, 1, 1]]
    with pytest.raises(LayoutError, match="P\\(prod\\)"):
        weft.to_dtensor(weft.ones(2, placement=PAIR, sbp=weft.partial("prod")), mesh)


def diverging(rank: int) -> None:
    """Rank 1 calls another op: both are told, with the lines."""
    x = weft.ones(4, 4, placement=PAIR, sbp=P())
    with pytest.raises(RankFailure) as caught:
        torch.relu(x) if rank == 0 else torch.exp(x)
    text = str(caught.value)
    assert "the ranks run different ops" in text
    assert "rank 0: aten.relu.default: float32[4, 4] as (P(sum)) on cpu [0, 1] to (S(0))" in text
    assert "rank 1: aten.exp.default" in text
    assert "global_rank.py:" in text


def diverging_early(rank: int) -> None:
    """The same where nothing is sent, when every op is compared."""
    x = weft.ones(4, 4, placement=PAIR, sbp=S(0))
    with weft.check_every_op():
        assert (x + x).to_local().sum() == 16
        with pytest.raises(
            RankFailure, match="rank 1: aten.exp.default where operands are laid out as"
        ):
            torch.relu(x) if rank == 0 else torch.exp(x)


def diverging_where_nothing_is_sent(rank: int) -> None:
    """Ops that send nothing differ, or their numbers do: the next communication tells, and then all is well again."""
    x = weft.ones(4, 4, placement=PAIR, sbp=S(0))
    weft.manual_seed(0)
    weft.rand(4, placement=PAIR, sbp=S(0))  # the first draw from a seed communicates
    differing = (
        lambda: torch.relu(x) if rank == 0 else torch.exp(x),
        lambda: x * (2.5 + rank),
        lambda: x * (2 + rank),
        lambda: x.sum(rank),
        lambda: x + x if rank == 0 else None,
        lambda: weft.full([4], float(rank), placement=PAIR, sbp=B),
        lambda: weft.full([4], 1 + rank, placement=PAIR, sbp=P()),
        lambda: weft.zeros(4 + 2 * rank, placement=PAIR, sbp=S(0)),
        lambda: weft.empty(4, dtype=(torch.float32, torch.int64)[rank], placement=PAIR, sbp=B),
        lambda: weft.arange(rank, 4 + rank, placement=PAIR, sbp=S(0)),
        lambda: weft.tensor([1, 2], placement=PAIR, sbp=(S(0), B)[rank]),
        lambda: weft.from_local(torch.ones(1 + rank), placement=PAIR, sbp=S(0)),
        lambda: weft.from_local(torch.ones(2), placement=PAIR, sbp=(S(0), P())[rank]),
        lambda: weft.rand(4, placement=PAIR, sbp=S(0)) if rank == 0 else None,
        lambda: torch.rand_like(x) if rank == 0 else None,
    )
    for differ in differing:
        differ()
        with pytest.raises(RankFailure) as caught:
            x.sum().full()
        assert "the ranks have run different ops since they last compared them" in str(caught.value)
        assert "rank 0: " in str(caught.value)
    weft.manual_seed(0)
    weft.rand(4, placement=PAIR, sbp=S(0))  # both draw the same again
    assert x.sum().full() == 16


def plain(rank: int) -> None:
    """Plain tensors that are the same on both ranks may meet global ones; others are told, with the lines."""
    x = weft.ones(4, 4, placement=PAIR, sbp=P())
    scale = torch.arange(4.0)
    for _ in range(2):
        assert torch.equal((x * scale).full(), scale.expand(4, 4))
    scale.add_(rank)
    for other in (scale, torch.tensor(float(rank))):
        y = x * other
        with pytest.raises(RankFailure) as caught:
            y.full()
        text = str(caught.value)
        assert "plain tensors that met global ones differ between the ranks" in text
        assert f"rank 0: torch.float32 {list(other.shape)} (" in text
        assert "global_rank.py:" in text
        assert "weft.from_local(x, …)" in text
    assert torch.equal(x.full(), torch.ones(4, 4))


def parts(rank: int) -> None:
    """Parts along an axis with Broadcast are the same; others are told."""
    grid = weft.placement("cpu", [[0, 1]])
    x = weft.ones(4, 4, placement=PAIR, sbp=P())
    for placement, sbp, same in ((PAIR, S(0), True), (PAIR, B, False), (grid, (S(0), B), False)):
        y = weft.ones(2, placement=placement, sbp=P())
        weft.from_local(torch.full((2,), 1.0), placement=placement, sbp=sbp)
        y.full()
        weft.from_local(torch.full((2,), float(rank)), placement=placement, sbp=sbp)
        if not same:
            with pytest.raises(RankFailure) as caught:
                y.full()
            text = str(caught.value)
            assert "as a part that is given to weft.from_local does" in text
            assert f"rank 0: as ({'S(0), ' * (placement is grid)}B) on" in text
        y.full()
    assert torch.equal(x.full(), torch.ones(4, 4))


def sparse(rank: int) -> None:
    """Sparse tensors that are the same on both ranks may meet global ones; others are told."""
    whole = torch.arange(16.0).view(4, 4)
    for sbp in (B, S(0)):
        x = weft.tensor(whole, placement=PAIR, sbp=sbp)
        for other in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()):
            assert torch.equal(torch.sparse.mm(other, x).full(), whole)
        own = torch.eye(4).mul(1 + rank).to_sparse()
        with pytest.raises(RankFailure, match="plain tensors that met global ones differ"):
            ((own @ x) * weft.ones(4, 4, placement=PAIR, sbp=P())).full()


def plain_forms(rank: int) -> None:
    """Each process has the values of what is whole, and asks no other for them."""
    x = weft.ones(2, 2, placement=PAIR, sbp=B)
    there = weft.ones(2, 2, placement=weft.placement("cpu", [0]), sbp=B)
    part = weft.ones(2, 2, placement=PAIR, sbp=S(0))
    for tensor in (x, there, part):
        if tensor is x or (tensor is there and rank == 0):
            assert tensor.numpy().tolist() == [[1, 1], [1, 1]]
            assert pickle.loads(pickle.dumps(tensor)).tolist() == [[1, 1], [1, 1]]
        else:
            with pytest.raises(UserError, match=r"numpy\(\) of float32.*x\.full\(\)"):
                tensor.numpy()
            with pytest.raises(UserError, match=r"pickling of float32.*weft\.whole\(x\)"):
                pickle.dumps(tensor)
    assert weft.whole([part, 3])[0].tolist() == [[1, 1], [1, 1]]


def missing(rank: int) -> None:
    """Rank 1 does not come: rank 0 is told within the time-out."""
    x = weft.ones(4, 4, placement=PAIR, sbp=P())
    if rank == 0:
        with pytest.raises(RankFailure, match=r"with ranks \[1\] failed"):
            torch.relu(x)


def crossing(rank: int) -> None:
    """Each waits in a group where the other does not come: both are told, well before the time-out."""
    pairs = PAIR, weft.placement("cpu", [1, 0])
    first, second = (weft.ones(4, 4, placement=pair, sbp=P()) for pair in pairs)
    with pytest.raises(RankFailure) as caught:
        torch.relu(first) if rank == 0 else torch.exp(second)
    text = str(caught.value)
    assert "the ranks wait for one another" in text
    assert "rank 0 waits for rank 1 among [0, 1]: aten.relu.default" in text
    assert "rank 1 waits for rank 0 among [1, 0]: aten.exp.default" in text
    assert "global_rank.py:" in text


def slow(rank: int) -> None:
    """A rank that comes late is waited for, whatever it did before."""
    x = weft.ones(4, 4, placement=PAIR, sbp=P())
    started = time.monotonic()
    while rank == 1 and time.monotonic() < started + 2.5 * PATIENCE:
        torch.ones(100).exp()
    assert torch.relu(x).full().sum() == 16


if __name__ == "__main__":
    here = start()
    divergences = (diverging, diverging_early, diverging_where_nothing_is_sent)
    together = (
        training,
        borders,
        dtensors,
        *divergences,
        plain,
        parts,
        sparse,
        plain_forms,
        missing,
    )
    for case in (slow, crossing) if sys.argv[1:] else together:
        case(here)
        sys.stdout.write(f"{case.__name__} passed\n")
