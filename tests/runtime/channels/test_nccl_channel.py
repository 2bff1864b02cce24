"""What is left to NCCL: with stand-ins for its operations, pieces come to the right places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.errors import NoAnswer
from weft.ir.plan import Collective, LocalValue
from weft.runtime.channels import process as process_channel
from weft.runtime.channels.collectives import run_collectives
from weft.runtime.channels.process import NcclChannel

# In the communicator's order, which is not that of torch's group: there rank 3 is the second.
RANKS = (3, 1)


class Operations:
    """In place of `torch.distributed`: a group in which rank 3 sends what this rank sends plus 10."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self) -> None:
        self.done: list[str] = []

    def all_reduce(self, tensor: Tensor, operation: Any, group: Any) -> None:
        self.done.append("all_reduce")

    def all_gather(self, places: list[Tensor], part: Tensor, group: Any) -> None:
        self.done.append("all_gather")
        own, other = places
        own.copy_(part)
        other.view(torch.float32).copy_(part.view(torch.float32) + 10)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Operations:
    made = Operations()
    monkeypatch.setattr(process_channel, "dist", made)
    return made


def gathered(sizes: tuple[int, int]) -> Collective:
    values = [
        LocalValue("x", (sizes[1], 2), "float32"),
        LocalValue("y", (sum(sizes), 2), "float32"),
    ]
    return Collective("all_gather", 0, *values, sizes=sizes)


def test_it_connects_its_ranks_when_it_is_made(operations: Operations) -> None:
    channel = NcclChannel(None, RANKS, 1, torch.device("cpu"), None)
    assert operations.done == ["all_reduce"]
    assert not channel.sent


def test_even_gathers_are_its_own(operations: Operations) -> None:
    channel = NcclChannel(None, RANKS, 1, torch.device("cpu"), None)
    mine = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    (whole,) = run_collectives(channel, [gathered((2, 2))], [mine])
    # Rank 3 comes first in the communicator.
    assert whole.tolist() == [[10, 11], [12, 13], [0, 1], [2, 3]]
    assert operations.done == ["all_reduce", "all_gather"]
    assert channel.sent == {"all_gather": mine.nbytes}


def test_uneven_gathers_are_exchanges(
    operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = NcclChannel(None, RANKS, 1, torch.device("cpu"), None)
    exchanged: list[int] = []

    def send(works: list[Any]) -> list[Any]:
        exchanged.append(len(works))
        return []

    for name in ("irecv", "isend"):
        setattr(operations, name, None)
    operations.P2POp = lambda *arguments, **named: named["group_peer"]  # type: ignore[attr-defined]
    operations.batch_isend_irecv = send  # type: ignore[attr-defined]
    run_collectives(channel, [gathered((1, 2))], [torch.ones(2, 2)])
    assert exchanged == [2]
    assert "all_gather" not in operations.done


class QuietBoard:
    """Nobody has announced a failure."""

    def cause(self, seconds: float) -> None:
        return None


def reduced(operations: Operations, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """An all-reduce in which NCCL raises an error."""
    channel = NcclChannel(None, RANKS, 1, torch.device("cpu"), QuietBoard())

    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(operations, "all_reduce", fail)
    channel.all_reduce([torch.ones(2)], "sum")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no such kernel")]
)
def test_what_is_no_peers_doing_is_raised_as_it_is(
    operations: Operations, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with pytest.raises(type(error)) as found:
        reduced(operations, monkeypatch, error)
    assert found.value is error


def test_a_lost_peer_is_told_of(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = torch.distributed.DistBackendError("NCCL error")
    with pytest.raises(NoAnswer, match=r"an all_reduce with ranks \[3\] failed, so a peer"):
        reduced(operations, monkeypatch, lost)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.int16])
def test_what_nccl_does_not_reduce_is_exchanged(
    operations: Operations, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    channel = NcclChannel(None, RANKS, 1, torch.device("cpu"), None)
    exchanged: list[Any] = []
    monkeypatch.setattr(NcclChannel, "_exchange", lambda *_: exchanged.append(dtype))
    operations.done.clear()
    channel.all_reduce([torch.ones(2, dtype=dtype)], "max")
    assert exchanged
    assert operations.done == []
