"""Communicators between ranks that are threads of one process and compute on CUDA devices.

A rank reads its peers' tensors on its own stream, once the work that makes them is done; they may
be overwritten or freed once all have read them. Threads meet on the host, devices by events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.runtime.channels.channel import Channel
from weft.runtime.channels.local import LocalChannel


class CudaLocalChannel(LocalChannel):
    """One rank's end of a `LocalGroup` on a CUDA device."""

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        self._await_all(f"{self.running} begins")
        super()._exchange(sends, receives)
        self._await_all(f"{self.running} ends")

    def _all_reduce(self, tensors: Sequence[Tensor], reduction: str) -> None:
        # By exchanges: only these make the devices wait for each other.
        Channel._all_reduce(self, tensors, reduction)

    def _reduce_parts(self, pieces: Sequence[Sequence[Tensor]], reduction: str) -> None:
        Channel._reduce_parts(self, pieces, reduction)

    def _await_all(self, kind: str) -> None:
        """Let the stream of this rank wait until all ranks have done the work that is on theirs by now."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        for other in self._group.put(self.index, kind, event):
            # A copy between devices runs on the stream of the one that it reads from.
            for device in (self.device, other.device):
                torch.cuda.current_stream(device).wait_event(other)
        self._group.leave(self.index, kind)
