"""How a part of a segment runs: as ATen code, or compiled by Inductor; chosen by measurement.

What was measured is kept on disk (`weft.runtime.cache`), as are Inductor's kernels. The ranks of a
host compile and measure one after another, so each distinct part is compiled once.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from filelock import FileLock
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.errors import UserError
from weft.runtime.cache import cache_folder, read_cached, write_cached
from weft.runtime.inductor import Boxed, compile_boxed, missing_compiler

Kernels: TypeAlias = Literal["aten", "inductor", "auto"]
KERNELS: tuple[Kernels, ...] = ("aten", "inductor", "auto")

# Inductor must be faster by this factor: it costs time to compile, and measurements vary.
MARGIN = 1.03
# Seconds that a side is measured for, and rounds at least.
PATIENCE = 0.2
ROUNDS = 5


class Spec(NamedTuple):
    """What a kernel is compiled for: one input's shape, strides, dtype and device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        return Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor of this shape has these strides, where they mean anything."""
        if tensor.numel() == 0:
            return True
        pairs = zip(self.shape, self.stride, tensor.stride(), strict=True)
        return all(size == 1 or mine == found for size, mine, found in pairs)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def example(self) -> Tensor:
        """Plain numbers: 1 for floating point, 0 (a valid index) for others."""
        return self.empty().fill_(1 if self.dtype.is_floating_point else 0)


@dataclass(frozen=True, slots=True)
class Code:
    """A part as ATen code.

    Attributes:
        source: of `function`.
        function: of the inputs; returns the outputs.
        inputs: what it takes.
    """

    source: str
    function: Callable[..., Sequence[Tensor]]
    inputs: tuple[Spec, ...]

    def key(self) -> str:
        """What a measurement holds for."""
        device = self.inputs[0].device
        cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if cuda else _processor()
        every = (self.source, self.inputs, torch.__version__, name, torch.get_num_threads())
        return hashlib.sha256(repr(every).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Choice:
    """How a part runs.

    Attributes:
        compiled: Inductor's function; None for ATen code.
        aten, inductor: measured seconds, or None.
        problem: why Inductor could not compile it, or "".
    """

    compiled: Boxed | None
    aten: float | None = None
    inductor: float | None = None
    problem: str = ""


def usable_kernels(kernels: Kernels, device_type: str) -> Kernels:
    """What of `kernels` can be had on devices of this type here: "auto" is ATen code without a compiler.

    Raises:
        UserError: there is no such way to run kernels, or no compiler for it.
    """
    if kernels not in KERNELS:
        raise UserError(f'kernels= takes "aten", "inductor" or "auto", found {kernels!r}')
    missing = None if kernels == "aten" else missing_compiler(device_type)
    if missing is None:
        return kernels
    if kernels == "inductor":
        raise UserError(f'kernels="inductor" cannot be had: {missing}, or use kernels="aten"')
    warnings.warn(f'kernels="auto" runs ATen code: {missing}', stacklevel=3)
    return "aten"


def choose(code: Code, kernels: Kernels) -> Choice:
    """Compile a part if that pays, or if it is asked for.

    Args:
        code: the part.
        kernels: "inductor", or "auto" to take what is faster.
    """
    with _one_at_a_time():
        file = cache_folder() / "kernels" / f"{code.key()}.json"
        known = read_cached(file) if kernels == "auto" else None
        if known is not None and not _pays(*known):
            return Choice(None, *known)
        try:
            compiled = _compiled(code)
        except Exception as error:  # whatever Inductor cannot lower runs as ATen code
            return Choice(None, problem=f"{type(error).__name__}: {error}".splitlines()[0])
        if kernels == "inductor":
            return Choice(compiled)
        if known is None:
            known = _measured(code, compiled)
            write_cached(file, known)
        return Choice(compiled if _pays(*known) else None, *known)


def _pays(aten: float, inductor: float) -> bool:
    return inductor * MARGIN < aten


def _compiled(code: Code) -> Boxed:
    with FakeTensorMode():
        examples = [spec.empty() for spec in code.inputs]
    return compile_boxed(code.function, examples)


def _measured(code: Code, compiled: Boxed) -> tuple[float, float]:
    """Median seconds of (ATen code, Inductor), in interleaved rounds on inputs of the real sizes."""
    tensors = [spec.example() for spec in code.inputs]
    sides = (lambda: code.function(*tensors), lambda: compiled(list(tensors)))
    with torch.no_grad():
        once = [_seconds(side, 1, tensors[0].device) for _ in range(2) for side in sides]
        # What the first call of a side costs by itself does not count.
        calls = max(1, int(PATIENCE / ROUNDS / max(1e-6, *once[2:])))
        rounds = [[_seconds(one, calls, tensors[0].device) for one in sides] for _ in range(ROUNDS)]
    aten, inductor = (statistics.median(side) for side in zip(*rounds, strict=True))
    return aten, inductor


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


_lock = threading.Lock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keeps other threads and other ranks of this host from compiling and measuring meanwhile."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _lock, FileLock(folder / "compiling.lock"):
        yield


def _processor() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
