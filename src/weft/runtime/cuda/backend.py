"""Backends as data: what the runtime has to know of a device type (`weft.hardware.device_type` of plans).

Which kernel of torch suits a device is decided where kernels are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

import torch

from weft.runtime.cuda.cuda_streams import CudaStreams
from weft.runtime.cuda.graphs import CudaTape
from weft.runtime.cuda.replay import Tape
from weft.runtime.cuda.streams import MakeStreams


@final
@dataclass(frozen=True)
class Backend:
    """The parts that ranks on devices of one type run with.

    Attributes:
        streams: what makes the streams of a rank; None where a call has ended when it returns, and
            a rank needs threads.
        tape: what makes the recorder of CUDA graphs; None where nothing can be replayed.
        current: makes a device the current one.
    """

    streams: MakeStreams | None = None
    tape: Callable[[torch.device], Tape] | None = None
    current: Callable[[torch.device], AbstractContextManager[object]] = nullcontext


BACKENDS = {"cpu": Backend(), "cuda": Backend(CudaStreams, CudaTape, torch.cuda.device)}


def backend_of(device: torch.device) -> Backend:
    """The backend of ranks on a device."""
    return BACKENDS[device.type]
