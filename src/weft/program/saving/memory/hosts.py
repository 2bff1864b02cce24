"""The hosts of a job, as snapshots see them, and each process's buddy: one on the next host, in a ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from weft.runtime.channels.channel import Channel


@final
@dataclass(frozen=True)
class Hosts:
    """The hosts of a job.

    Attributes:
        names: of each process's host, in the order of the processes.
    """

    names: tuple[str, ...]

    @cached_property
    def members(self) -> dict[str, tuple[int, ...]]:
        """The processes of each host, hosts in the order of their first ones."""
        found: dict[str, list[int]] = {}
        for process, name in enumerate(self.names):
            found.setdefault(name, []).append(process)
        return {name: tuple(each) for name, each in found.items()}

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first process of each host, which does what one alone has to do there."""
        return tuple(each[0] for each in self.members.values())

    def first(self, process: int) -> int:
        """The first process of a process's host."""
        return self.members[self.names[process]][0]

    @cached_property
    def buddies(self) -> dict[int, int]:
        """Each process's buddy, which gets a copy of what it saves; none where there is one host."""
        hosts = list(self.members.values())
        if len(hosts) < 2:
            return {}
        return {
            process: following[number % len(following)]
            for members, following in zip(hosts, hosts[1:] + hosts[:1], strict=True)
            for number, process in enumerate(members)
        }

    def copied_to(self, process: int) -> tuple[int, ...]:
        """The processes whose buddy a process is."""
        return tuple(each for each, buddy in self.buddies.items() if buddy == process)


@final
@dataclass(frozen=True)
class BuddyLine:
    """The line between all processes, over which buddies get their copies.

    Attributes:
        channel: of all processes; None where this is the only one.
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
