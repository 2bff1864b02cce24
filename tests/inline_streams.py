"""The streams of a device that has none, for executors of devices with streams on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns
from typing import final

import torch
from torch import Tensor

from weft.runtime.devices.backend import Launch, Streams


@final
class Inline(Streams):
    """Everything runs at once, where it is called; the arguments are those of any `MakeStreams`."""

    def __init__(
        self,
        device: torch.device,
        launches: Sequence[Launch],
        timeout: float,
        unfinished: Callable[[int], str],
    ) -> None:
        self._begun = [0] * len(launches)
        self._ended = [0] * len(launches)

    def begin(self) -> None:
        """Nothing continues from step to step."""

    def enter(self, launch: Launch) -> None:
        self._begun[launch.place] = perf_counter_ns()

    def read(self, tensor: Tensor) -> None:
        """There is one stream."""

    def leave(self, launch: Launch) -> None:
        self._ended[launch.place] = perf_counter_ns()

    def end(self, results: Iterable[Tensor]) -> None:
        """All has ended."""

    def wait(self) -> None:
        """All has ended."""

    def stop(self) -> None:
        """The stream is the caller's."""

    def times(self) -> Sequence[tuple[int, int]]:
        return list(zip(self._begun, self._ended, strict=True))
