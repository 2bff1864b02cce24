"""The hosts of a job, as snapshots see them, and each process's buddy: one on the next host, in a ring."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final


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
