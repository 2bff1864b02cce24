"""The line between all processes, beside those of their steps, over which buddies get their copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.program.saving.memory.hosts import Hosts
from weft.runtime.channels.channel import Channel


@final
@dataclass(frozen=True)
class BuddyLine:
    """The line between all processes, over which buddies get their copies.

    Attributes:
        channel: of all processes; None where this is the only one.
        hosts: of all.
        process: this one.
    """

    channel: Channel | None
    hosts: Hosts
    process: int

    def swap(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Send tensors to processes, and fill others with what comes from some.

        Raises:
            RankFailure: a process has gone.
        """
        if self.channel is not None:
            every = range(self.channel.size)
            self.channel.exchange(
                [list(sends.get(each, ())) for each in every],
                [list(receives.get(each, ())) for each in every],
            )

    def failed(self, why: str) -> str:
        """The first of the reasons that processes have; "" where none has one. All must call it."""
        if self.channel is None:
            return why
        flag = torch.tensor([bool(why)], dtype=torch.int32)
        self.channel.all_reduce([flag], "max")
        if not int(flag):
            return ""
        every = self.channel.exchange_text(why)
        return next(f"rank {rank}: {text}" for rank, text in enumerate(every) if text)
