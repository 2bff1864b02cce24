"""Backends as data: all that the runtime has to know of a device type, a row of a table for each.

Facts that plans need of a device type are in `weft.hardware.costs`. Which kernel of torch suits a device is
decided where kernels are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

import torch

from weft.runtime.channels.local import LocalChannel
from weft.runtime.channels.process import GlooChannel, GroupChannel, NcclChannel
from weft.runtime.devices.cuda_graphs import CudaGraphCapture, GraphCapture
from weft.runtime.devices.cuda_streams import CudaLocalChannel, CudaStreams
from weft.runtime.devices.streams import MakeStreams


@final
@dataclass(frozen=True)
class Backend:
    """The parts that ranks on devices of one type run with, and talk to one another by.

    Attributes:
        shares_memory: whether processes of one host may exchange through its memory.
        count: how many devices this process sees; None where all ranks of a host are on one.
        choose: makes a device the current one of this process.
    """

    library: str
    process_channel: type[GroupChannel]
    local_channel: type[LocalChannel]
    shares_memory: bool = False
    count: Callable[[], int] | None = None
    streams: MakeStreams | None = None
    tape: Callable[[torch.device], GraphCapture] | None = None
    current: Callable[[torch.device], AbstractContextManager[object]] = nullcontext
    choose: Callable[[torch.device], None] = lambda _: None

    def device(self, name: str, index: int) -> torch.device:
        """The device of rank `index` of a host; where there are fewer, they are given out in turn."""
        return (
            torch.device(name) if self.count is None else torch.device(name, index % self.count())
        )


BACKENDS = {
    "cpu": Backend("gloo", GlooChannel, LocalChannel, shares_memory=True),
    "cuda": Backend(
        "nccl",
        NcclChannel,
        CudaLocalChannel,
        count=lambda: torch.cuda.device_count(),
        streams=CudaStreams,
        tape=CudaGraphCapture,
        current=torch.cuda.device,
        choose=lambda device: torch.cuda.set_device(device),
    ),
}


def backend_of(device: torch.device) -> Backend:
    """The backend of ranks on a device."""
    return BACKENDS[device.type]
