"""What a machine does besides what is measured: other processes, and time that its host keeps from it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Processor seconds a second that others may use while a round is measured, and that the host may keep.
FOREIGN, STEAL = 0.05, 0.02
PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
# Columns of a processor in /proc/stat (proc(5)): work of processes, without interrupts, which Gloo's packets are too.
USER, NICE, SYSTEM, STOLEN = 0, 1, 2, 7


@dataclass(frozen=True)
class Load:
    """What else went on in a span of time.

    Attributes:
        foreign: processor seconds a second of processes that are not measured, on the processors that these may use.
        steal: the same of the host, for others than this machine.
        average: processes that ran or waited for a processor in the last minute, at the end (/proc/loadavg).
    """

    foreign: float
    steal: float
    average: float

    @property
    def disturbs(self) -> bool:
        return self.foreign > FOREIGN or self.steal > STEAL

    def row(self) -> Mapping[str, Any]:
        """As results keep it."""
        return {
            **{name: round(each, 3) for name, each in asdict(self).items()},
            "disturbed": self.disturbs,
        }


class Watch:
    """Looks on from when it is made.

    Args:
        processes: those that are measured; this one is, too.
        proc: where the kernel tells of processes.
    """

    def __init__(self, processes: Iterable[int], proc: Path = PROC) -> None:
        self._proc = proc
        self._processes = sorted({*processes, os.getpid()})
        self._before = self._seen()

    def load(self) -> Load:
        """Since it was made, or since the last call."""
        before, self._before = self._before, self._seen()
        seconds, busy, stolen, own = (
            after - then for after, then in zip(self._before, before, strict=True)
        )
        average = float((self._proc / "loadavg").read_text().split()[0])
        return Load(max(0.0, busy - own) / seconds, stolen / seconds, average)

    def _seen(self) -> tuple[float, float, float, float]:
        """The clock, and seconds of all processes, of the host, and of what is measured."""
        every = list(_processors((self._proc / "stat").read_text()))
        busy = sum(counts[USER] + counts[NICE] + counts[SYSTEM] for counts in every)
        stolen = sum(counts[STOLEN] for counts in every)
        own = sum(self._used(each) for each in self._processes)
        return time.perf_counter(), busy / TICKS, stolen / TICKS, own / TICKS

    def _used(self, process: int) -> int:
        """Ticks that all threads of a process have used; 0 when it has ended."""
        try:
            told = (self._proc / str(process) / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        fields = told.rpartition(")")[2].split()  # its name may hold anything
        return int(fields[11]) + int(fields[12])


def _processors(stat: str) -> Iterable[Sequence[int]]:
    """The counts of each processor that this process may run on."""
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    for line in stat.splitlines():
        name, *counts = line.split()
        if name in own:
            yield [int(each) for each in counts]
