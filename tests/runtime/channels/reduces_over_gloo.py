"""One rank of test_overlapped.py: all-reduces over Gloo of tensors that take several slices, and bits compared."""

from __future__ import annotations

import os
import sys

import torch

from weft.runtime.channels.channel import reduce_in_order
from weft.runtime.channels.process import SLICE, GlooChannel
from weft.runtime.world.distributed import DistributedWorld

# Elements of float32: one slice and a bit, several, none, few, an odd number.
COUNTS = (SLICE // 4 + 5, SLICE + 3, 0, 7, 3 * SLICE // 8 + 1)


def of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + count % 7)
    values = torch.randn(count, generator=generator) * 10 ** (rank % 3)
    return values.to(dtype) if dtype.is_floating_point else (values * 9).to(dtype)


if __name__ == "__main__":
    world = DistributedWorld("cpu", 30)
    channel = world._everyone
    assert isinstance(channel, GlooChannel)
    rank, size = int(os.environ["RANK"]), world.size
    for number, (dtype, reduction) in enumerate(
        [
            (torch.float32, "sum"),
            (torch.float64, "max"),
            (torch.int64, "sum"),
            (torch.bfloat16, "sum"),
        ]
    ):
        channel.checksum = number + 1  # as if each were a step
        found = [of(rank, count, dtype) for count in COUNTS]
        before = channel.sent["all_reduce"]
        channel.all_reduce(found, reduction)
        whole = sum(x.nbytes for x in found)
        sent = channel.sent["all_reduce"] - before
        assert abs(sent - 2 * (size - 1) / size * whole) < 1000, (sent, whole)
        for tensor, count in zip(found, COUNTS, strict=True):
            expected = reduce_in_order([of(each, count, dtype) for each in range(size)], reduction)
            assert torch.equal(tensor, expected), (dtype, count)
    sys.stdout.write("equal\n")
