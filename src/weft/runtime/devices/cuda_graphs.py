"""Segments as CUDA graphs: captured in a step, replayed from then on.

A CUDA graph runs the same kernels on the same addresses again. The inputs of a graph must therefore have the
addresses of the capture: variables and results of other graphs do; all other inputs are first copied to a static
buffer. The results of a graph are at one address in every step. Each micro-batch has a graph of its own, so a version
of a register is never overwritten by the next one.

All graphs of a rank share a pool of memory. They are replayed in the order in which they were
captured, and on one stream, so what one has freed may serve the later ones; what anything else
reads, such as a communication on its own stream, is held for good.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final, get_args

import torch
from torch import Tensor

from weft.cached import cached_property
from weft.errors import RankFailure, wrong
from weft.ir.plan import Compute, GraphedRun, GraphMode, RankPlan
from weft.ops.weft_ops import WEFT_OPS
from weft.runtime.failures.failure_store import first_line
from weft.runtime.kernels.generated import UNIFORM, Kernel
from weft.runtime.memory.state import Batches
from weft.runtime.random import DrawKeys
from weft.runtime.torch_ops import torch_op

# Steps that run call by call before any is captured: in the first one, kernels are chosen and
# loaded; in the last one, what makes the host wait is found.
WARM_UP = 2

# `call(draw, micro, operands)`: the calls of a segment; it may empty the list.
Call: TypeAlias = Callable[[Callable[..., Tensor] | None, int, list[Tensor]], Sequence[Tensor]]
# `run(step, micro, operands)`: the same, random ops drawing for a step.
Run: TypeAlias = Callable[[int, int, list[Tensor]], Sequence[Tensor]]


class GraphCapture(ABC):
    """The recorder that captures graphs. One thread uses it."""

    @abstractmethod
    def capture(
        self, function: Callable[[], Sequence[Tensor]]
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Note what a function launches; nothing runs yet."""

    @abstractmethod
    def unheld(self, tensor: Tensor) -> Tensor:
        """The same elements in the same place, without holding the memory."""

    @abstractmethod
    def host_waits(self) -> AbstractContextManager[list[str]]:
        """Collects what makes the host wait for the device meanwhile."""


# Tags of torch ops that must not be captured, and why. None draws from torch's
# generators: capture leaves that to `weft.uniform`.
_TAGS = {
    "data_dependent_output": "its result depends on values that the host reads",
    "dynamic_output_shape": "its shape depends on values",
    "cudagraph_unsafe": "it is marked as unsafe for CUDA graphs",
}


def capture_obstacle(op: str) -> str | None:
    """The reason why an op cannot be captured; None when it can."""
    if op in WEFT_OPS:
        host = WEFT_OPS[op].host
        return f"{op}: {host}" if host else None
    if not op.startswith("aten."):
        return f"{op}: it is an op of the user's, and may do anything on the host"
    tags = {tag.name for tag in torch_op(op).tags}
    return next((f"{op}: {why}" for name, why in _TAGS.items() if name in tags), None)


@final
@dataclass(eq=False)
class GraphRunner:
    """The graphs of one rank.

    Attributes:
        stopped: for the id of each segment that turned out not to suit, why.
    """

    plan: RankPlan
    replays: GraphedRun
    tape: GraphCapture
    device: torch.device
    seed: int
    stopped: dict[int, str] = field(default_factory=dict)

    @cached_property
    def _makers(self) -> dict[str, int]:
        return {r.value.name: r.producer for r in self.plan.registers}

    @cached_property
    def _readers(self) -> dict[str, tuple[int, ...]]:
        return {r.value.name: r.consumers for r in self.plan.registers}

    def lies_still(self, name: str) -> bool:
        """True if a register's tensor is in one place in every step: a graph makes it."""
        maker = self._makers.get(name)
        return maker in self.plan.replayed and maker not in self.stopped

    def leaves(self, name: str) -> bool:
        """True if anything but a graph reads a value, on whatever stream, or hands a view of it on."""
        graphs = self.plan.replayed - self.stopped.keys()
        return not graphs.issuperset(self._readers.get(name, ()))


@final
class GraphedSegment:
    """The calls of one segment: one by one in the first steps, then as a graph for each micro-batch.

    Args:
        launched: the same, drawing for a step.
        batches: of the rank, which say how many steps were before, for the random ops.
    """

    def __init__(
        self,
        actor: int,
        replayer: GraphRunner,
        call: Call,
        launched: Run,
        kernel: Kernel,
        bound: frozenset[str],
        draws: int,
        batches: Batches,
    ) -> None:
        self._actor = actor
        self._replayer = replayer
        self._call = call
        self._launched = launched
        self._inputs, self._outputs = kernel.inputs, kernel.outputs
        self._bound = bound
        self._draws = draws
        self._batches = batches
        self._graphs: dict[int, _CapturedGraph] = {}

    def __call__(self, step: int, micro: int, operands: list[Tensor]) -> Sequence[Tensor]:
        if step < WARM_UP - 1 or self._actor in self._replayer.stopped:
            return self._launched(step, micro, operands)
        if step < WARM_UP:
            return self._watched(step, micro, operands)
        if micro not in self._graphs:
            return self._capture(step, micro, operands)
        return self._graphs[micro].run(self._batches.first + step, operands)

    def _watched(self, step: int, micro: int, operands: list[Tensor]) -> Sequence[Tensor]:
        """The last step before capturing: nothing may make the host wait, or be in its memory."""
        here = self._replayer.device.type
        outside = any(operand.device.type != here for operand in operands)
        with self._replayer.tape.host_waits() as waits:
            outputs = self._launched(step, micro, operands)
        if outside or any(output.device.type != here for output in outputs):
            self._replayer.stopped[self._actor] = "it reads or makes tensors in host memory"
        elif waits:
            self._replayer.stopped[self._actor] = f"the host waits in it: {waits[0]}"
        return outputs

    def _capture(self, step: int, micro: int, operands: list[Tensor]) -> Sequence[Tensor]:
        still = [name in self._bound or self._replayer.lies_still(name) for name in self._inputs]
        pairs = tuple(zip(operands, still, strict=True))
        places = [operand.clone() for operand, stays in pairs if not stays]
        given = iter(places)
        taken = [operand if stays else next(given) for operand, stays in pairs]
        # A tensor that nobody else holds may be freed, and its memory reused, within the graph.
        operands.clear()
        del pairs
        keys = DrawKeys(self._replayer.seed, self._draws, self._replayer.device)
        draw = keys.draw if self._draws else None
        tape = self._replayer.tape
        launch, outputs = tape.capture(lambda: self._call(draw, micro, taken))
        lasting = [
            output if self._replayer.leaves(name) else tape.unheld(output)
            for name, output in zip(self._outputs, outputs, strict=True)
        ]
        self._graphs[micro] = _CapturedGraph(launch, tuple(still), places, lasting, keys)
        keys.write(self._batches.first + step)
        launch()
        return outputs


@final
@dataclass(frozen=True)
class _CapturedGraph:
    launch: Callable[[], None]
    still: tuple[bool, ...]
    places: list[Tensor]
    outputs: Sequence[Tensor]
    keys: DrawKeys

    def run(self, step: int, operands: list[Tensor]) -> Sequence[Tensor]:
        """Copy what goes in, and replay; `step` is that of the random ops."""
        moved = [one for one, stays in zip(operands, self.still, strict=True) if not stays]
        if moved:
            torch._foreach_copy_(self.places, moved)
        operands.clear()
        self.keys.write(step)
        self.launch()
        return self.outputs


def draws_of(segment: Compute) -> int:
    """The number of random ops of a segment."""
    return sum(getattr(node, "op", "") == UNIFORM for node in segment.nodes)


# "auto" (the default), "always" or "never".
VARIABLE = "WEFT_CUDA_GRAPHS"
# Torch's warning in the debug mode "warn".
_WAITS = "synchronizing CUDA operation"


def graph_mode() -> GraphMode:
    """The user's mode of CUDA graphs.

    Raises:
        UserError: when the variable holds something else.
    """
    found = os.environ.get(VARIABLE) or "auto"
    if found not in get_args(GraphMode):
        raise wrong(VARIABLE, f"one of {', '.join(get_args(GraphMode))}", found)
    return cast(GraphMode, found)


@final
class CudaGraphCapture(GraphCapture):
    """Captures on a stream of its own into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        # One stream for all: memory of a pool is handed on between captures of one stream only.
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(
        self, function: Callable[[], Sequence[Tensor]]
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads continue: NCCL's watchdog asks for events all the time.
        mode = "thread_local"
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                outputs = function()
        except RuntimeError as error:
            raise RankFailure(
                f"a segment could not be captured as a CUDA graph: {first_line(error)}; with "
                f"{VARIABLE}=never its calls are launched one by one"
            ) from error
        return graph.replay, outputs

    def unheld(self, tensor: Tensor) -> Tensor:
        # Bits that are to be read conjugated or negated cannot be told by an address.
        if not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return tensor
        memory: Any = torch.as_tensor(_Memory(tensor), device=tensor.device)
        elements: Tensor = memory.view(tensor.dtype)
        return elements.as_strided(tensor.shape, tensor.stride())

    @contextmanager
    def host_waits(self) -> Iterator[list[str]]:
        found: list[str] = []
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        texts = (str(each.message) for each in caught)
        found += [text.splitlines()[0] for text in texts if _WAITS in text]


@final
class _Memory:
    """Bytes of a device by their address; they belong to somebody else."""

    def __init__(self, tensor: Tensor) -> None:
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        self.__cuda_array_interface__ = {
            "shape": ((last + 1) * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }
