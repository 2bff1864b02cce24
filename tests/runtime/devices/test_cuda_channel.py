"""Ranks that share a process on CUDA: whatever they read of each other, the devices have waited for."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from weft.runtime.channels.local import LocalGroup
from weft.runtime.devices.backend import CudaLocalChannel

pytestmark = pytest.mark.timeout(30)


class Counted(CudaLocalChannel):
    """Says where the devices would wait, and what had been read until then."""

    def __init__(self, group: LocalGroup, index: int) -> None:
        super().__init__(group, index, torch.device("cpu"))
        self.waits: list[str] = []

    def _await_all(self, kind: str) -> None:
        self.waits.append(kind)


@pytest.mark.parametrize("numel", [6, 1 << 17], ids=["at once", "in parts"])
def test_devices_wait_before_and_after_each_exchange(numel: int) -> None:
    group = LocalGroup((0, 1), 10)
    channels = [Counted(group, index) for index in range(2)]
    tensors = [torch.full((numel,), float(index + 1)) for index in range(2)]

    def reduce(channel: Counted, tensor: Tensor) -> None:
        channel.all_reduce([tensor], "sum")

    threads = [
        threading.Thread(target=reduce, args=pair) for pair in zip(channels, tensors, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tensor.eq(3).all() for tensor in tensors)
    exchanges = 1 if numel == 6 else 2
    for channel in channels:
        assert channel.waits == ["all_reduce begins", "all_reduce ends"] * exchanges
