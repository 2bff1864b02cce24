"""Seconds of a part of a segment: as ATen code, compiled, and what compiling could gain at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# A compiled part must be faster by this factor. Alone on a quiet core equal code differs by 3 %, and
# by 10 % beside another rank; what wins by less than that is as likely to lose in a step.
MARGIN = 1.1
# Seconds that a side is measured for, and rounds at least.
PATIENCE = 0.2
ROUNDS = 5
# Fused, loops and what it costs to call ops have not been seen to take less than their third.
GAIN = 3.0
# Seconds of a part below which the cost of each call decides, which cannot be told from outside.
BRIEF = 1e-3
# Why a part is not compiled that matters too little to its program.
TOO_SHORT = "too short"

# Ops that Inductor calls as they are, by the beginnings of their names.
_KEPT = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "mkldnn::"),
    *("aten::_scaled_dot_product", "aten::_efficient_attention", "aten::_flash_attention"),
)


@final
class Measured(NamedTuple):
    """The measurements of a part.

    Attributes:
        aten, compiled: seconds; None where it was not measured.
        why: why it was not compiled, or "".
    """

    aten: float | None
    compiled: float | None = None
    why: str = ""

    @property
    def pays(self) -> bool:
        """True where the compiled part is faster beyond doubt."""
        both = self.aten is not None and self.compiled is not None
        return both and self.compiled * MARGIN < self.aten  # type: ignore[operator]


def compare(
    aten: Callable[..., object],
    compiled: Callable[[list[Tensor]], object],
    inputs: Sequence[Tensor],
) -> Measured:
    """Seconds of both sides: ATen's median, and what the median of the rounds' ratios makes of it."""
    sides = (lambda: aten(*inputs), lambda: compiled(list(inputs)))
    device = inputs[0].device
    with torch.no_grad():
        once = [_seconds(side, 1, device) for _ in range(2) for side in sides]
        # What the first call of a side costs by itself does not count.
        calls = max(1, int(PATIENCE / ROUNDS / max(1e-6, *once[2:])))
        rounds = [[_seconds(one, calls, device) for one in sides] for _ in range(ROUNDS)]
    seconds = statistics.median(first for first, _ in rounds)
    return Measured(
        seconds, seconds * statistics.median(second / first for first, second in rounds)
    )


def foreseen(
    aten: Callable[..., object], inputs: Sequence[Tensor], least: float
) -> Measured | None:
    """The result that is known before anything is compiled, where that cannot pay; else None.

    Args:
        least: seconds of a part that are worth being compiled.
    """
    device = inputs[0].device
    with torch.no_grad():
        aten(*inputs)
        seconds = min(_seconds(lambda: aten(*inputs), 1, device) for _ in range(3))
        if seconds < least:
            return Measured(seconds, None, TOO_SHORT)
        if device.type != "cpu" or seconds < BRIEF:
            return None
        kept = min(_kept_seconds(lambda: aten(*inputs)) for _ in range(2))
    possible = kept + max(0.0, seconds - kept) / GAIN
    return None if possible * MARGIN < seconds else Measured(seconds, None, "nothing to fuse")


def _kept_seconds(function: Callable[[], object]) -> float:
    """Seconds of the calls in a function that Inductor leaves as they are."""
    clock = _OpClock()
    with clock:
        function()
    return clock.seconds


@final
class _OpClock(TorchDispatchMode):
    """Adds up the seconds of ops that Inductor calls as they are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if func._schema.name.startswith(_KEPT):
            self.seconds += time.perf_counter() - start
        return result


def _seconds(function: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds for one of `calls` calls."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / calls
