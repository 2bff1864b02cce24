"""The form in which a part of a segment runs: as ATen code, or compiled by Inductor; chosen by measurement.

Measurements and compiled code are kept on disk (`weft.runtime.compiled.inductor`). The ranks of a host compile and
measure one after another, so each distinct part is compiled once, and parts that differ between
ranks only in where they cut a tensor are chosen alike.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from filelock import FileLock
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.errors import UserError, wrong
from weft.files import PACKAGE
from weft.runtime.compiled.inductor import (
    Boxed,
    cache_folder,
    check_places,
    compile_boxed,
    load,
    missing_compiler,
    read_cached,
    read_code,
    write_cached,
    write_text,
)

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
    """The measurements of a part."""

    aten: float | None
    compiled: float | None = None
    why: str = ""

    @property
    def pays(self) -> bool:
        """True if the compiled part is faster beyond doubt."""
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
        # The cost of the first call of a side does not count.
        calls = max(1, int(PATIENCE / ROUNDS / max(1e-6, *once[2:])))
        rounds = [[_seconds(one, calls, device) for one in sides] for _ in range(ROUNDS)]
    seconds = statistics.median(first for first, _ in rounds)
    return Measured(
        seconds, seconds * statistics.median(second / first for first, second in rounds)
    )


def foreseen(
    aten: Callable[..., object], inputs: Sequence[Tensor], least: float
) -> Measured | None:
    """The result that is known before anything is compiled, where that cannot pay; else None."""
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
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / calls


Kernels: TypeAlias = Literal["aten", "torch", "inductor", "auto"]
KERNELS: tuple[Kernels, ...] = ("aten", "torch", "inductor", "auto")
# The ones that compile nothing.
UNCOMPILED: tuple[Kernels, ...] = ("aten", "torch")

# Ops that cut a tensor, and the end of the cut.
_PLACES = re.compile(r"(\bweft_(?:slice|pad|keep)\(\w+).*")


@final
class KernelInput(NamedTuple):
    """The input that a kernel is compiled for: its shape, strides, dtype and device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> KernelInput:
        return KernelInput(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def fits(self, tensor: Tensor) -> bool:
        """True if a tensor of this shape has these strides, where they mean anything."""
        if tensor.numel() == 0:
            return True
        pairs = zip(self.shape, self.stride, tensor.stride(), strict=True)
        return all(size == 1 or mine == found for size, mine, found in pairs)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def example(self) -> Tensor:
        """Plain numbers: 1 for floating point, 0 (a valid index) for others."""
        return self.empty().fill_(1 if self.dtype.is_floating_point else 0)


@final
@dataclass(frozen=True, slots=True)
class Code:
    """A part as ATen code."""

    source: str
    function: Callable[..., Sequence[Tensor]]
    inputs: tuple[KernelInput, ...]

    def key(self) -> str:
        """The key of compiled code: all that it holds for."""
        flags = sorted(pair for pair in os.environ.items() if pair[0].startswith("TORCHINDUCTOR_"))
        return self._digest(self.source, _version(), flags)

    def kind(self) -> str:
        """The key of a measurement: all that it holds for; where a tensor is cut makes no difference."""
        return self._digest(_PLACES.sub(r"\1", self.source))

    def examples(self) -> list[Tensor]:
        return [spec.example() for spec in self.inputs]

    def _digest(self, *what: object) -> str:
        device = self.inputs[0].device
        cuda = device.type == "cuda"
        processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        name = torch.cuda.get_device_name(device) if cuda else processor
        every = (*what, self.inputs, torch.__version__, name, torch.get_num_threads())
        return hashlib.sha256(repr(every).encode()).hexdigest()[:32]


@final
@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The choice for a part."""

    compiled: Boxed | None
    aten: float | None = None
    inductor: float | None = None
    problem: str = ""


def usable_kernels(kernels: Kernels, device_type: str) -> Kernels:
    """The usable value of `kernels` on this type of device: without a compiler "auto" becomes "aten".

    Raises:
        UserError: there is no such way to run kernels, no compiler for it, or others may write to
            the folder of the cache.
    """
    if kernels not in KERNELS:
        raise wrong("kernels=", '"aten", "torch", "inductor" or "auto"', kernels)
    if kernels in UNCOMPILED:
        return kernels
    missing = missing_compiler(device_type)
    if missing is None:
        check_places()
        return kernels
    if kernels == "inductor":
        raise UserError(f'kernels="inductor" is not available: {missing}, or use kernels="aten"')
    warnings.warn(f'kernels="auto" runs ATen code: {missing}', stacklevel=3)
    return "aten"


def choose(code: Code, kernels: Kernels, least: float = 0.0) -> KernelChoice:
    """Compile a part if that pays, or if it is asked for.

    Args:
        least: seconds of a part that "auto" compiles.
    """
    with _one_at_a_time(), torch.no_grad():
        return _asked_for(code) if kernels == "inductor" else _faster(code, least)


def _asked_for(code: Code) -> KernelChoice:
    try:
        return KernelChoice(_compiled(code))
    except UserError:
        raise
    except Exception as error:  # whatever Inductor cannot lower runs as ATen code
        _warn(_line(error))
        return KernelChoice(None, problem=_line(error))


@cache
def _warn(problem: str) -> None:
    """Say once of each problem that a part is not compiled, though that was asked for."""
    warnings.warn(
        f'kernels="inductor" runs a part of the step as ATen code, as Inductor cannot compile it: {problem}; '
        "program.explain(details=True) names the parts",
        stacklevel=2,
    )


def _faster(code: Code, least: float) -> KernelChoice:
    """The faster choice, as was measured once on this kind of processor."""
    file = cache_folder("kernels") / f"{code.kind()}.json"
    known = _stored(file) or foreseen(code.function, code.examples(), least)
    if known is not None and not known.pays:
        _remember(file, known)
        return KernelChoice(None, *known)
    try:
        compiled = _compiled(code)
    except UserError:
        raise
    except Exception as error:  # as above
        known = Measured(None, None, _line(error))
        _remember(file, known)
        return KernelChoice(None, *known)
    if known is None:
        known = compare(code.function, compiled, code.examples())
        _remember(file, known)
    return KernelChoice(compiled if known.pays else None, *known)


def _stored(file: Path) -> Measured | None:
    found = read_cached(file)
    match found:
        case [None | int() | float() as aten, None | int() | float() as compiled, str() as why]:
            return Measured(aten, compiled, why)
    return None


def _remember(file: Path, known: Measured) -> None:
    """Keep what is known of a part, but not what depends on the program around it."""
    if known.why != TOO_SHORT:
        write_cached(file, known)


def _compiled(code: Code) -> Boxed:
    file = cache_folder("kernels") / f"{code.key()}.py"
    source = read_code(file)
    if source is not None:
        try:
            return load(source)
        except Exception:  # what was kept may lack what it needs: made again
            file.unlink(missing_ok=True)
    with FakeTensorMode():
        examples = [spec.empty() for spec in code.inputs]
    compiled = compile_boxed(code.function, examples)
    if compiled.source is not None:
        write_text(file, compiled.source)
    return compiled.function


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


_lock = threading.Lock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keeps other threads and other ranks of this host from compiling and measuring meanwhile."""
    with _lock, FileLock(cache_folder("kernels") / "compiling.lock"):
        yield


@cache
def _version() -> str:
    files = sorted(Path(PACKAGE, "runtime").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
