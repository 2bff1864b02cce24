"""CUDA graphs as `weft.runtime.devices.replay` uses them (docs/decisions/cuda-graphs.md)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, final, get_args

import torch
from torch import Tensor

from weft.errors import RankFailure, wrong
from weft.ir.plan import GraphMode
from weft.runtime.devices.replay import Tape
from weft.runtime.failures.board import first_line

# "auto" (the default), "always" or "never".
VARIABLE = "WEFT_CUDA_GRAPHS"
# What torch says in the debug mode "warn".
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
class CudaTape(Tape):
    """Captures on a stream of its own into one pool of memory.

    Args:
        device: of the rank; current whenever something is captured.
    """

    def __init__(self, device: torch.device) -> None:
        # One stream for all: memory of a pool is handed on between captures of one stream only.
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(
        self, function: Callable[[], Sequence[Tensor]]
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads go on: NCCL's watchdog asks for events all the time.
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
        found += [str(each.message).splitlines()[0] for each in caught if _waits(each)]


def _waits(warning: warnings.WarningMessage) -> bool:
    return _WAITS in str(warning.message)


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
