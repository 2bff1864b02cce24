"""Random ops of a plain step, drawn as the plan draws them: by seed, step and global position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.capture.fx.checkpoints import checkpoints_noted
from weft.capture.fx.generators import generators_followed
from weft.capture.fx.private import Decompositions, DispatchMode, Refusal
from weft.capture.ops import random, sampling
from weft.capture.ops.decompositions import decompositions
from weft.errors import VerificationError
from weft.ir import LogicalGraph
from weft.ir.logical import Call
from weft.runtime.random import uniform

# Of a draw: the size and the dtype.
_Draw = tuple[tuple[int, ...], torch.dtype]


def draws_of(graph: LogicalGraph) -> tuple[_Draw, ...]:
    """The draws of a captured step, in order."""
    calls = [call for call in graph.of_kind(Call) if call.op == "weft.uniform"]
    return tuple((_size(call.args[0]), getattr(torch, _dtype(call))) for call in calls)


@contextmanager
def drawn(draws: tuple[_Draw, ...], seed: int, step: int) -> Iterator[Drawn | None]:
    """While this lasts, random ops draw the numbers of a step of the plan; nothing changes where it draws none."""
    if not draws:
        yield None
        return
    # Checkpoints run once, as they would draw again; attention draws its mask where it is seen.
    around = checkpoints_noted(), sdpa_kernel(SDPBackend.MATH), generators_followed()
    with around[0], around[1], around[2], Drawn(draws, seed, step) as mode:
        try:
            yield mode
        except Refusal as refusal:
            raise VerificationError(f"the plain eager step {refusal}") from refusal


@final
class Drawn(DispatchMode):  # type: ignore[no-untyped-call]
    """Random ops as capture writes them, with numbers of the plan's generator."""

    def __init__(self, draws: tuple[_Draw, ...], seed: int, step: int) -> None:
        super().__init__()
        self._draws = draws
        self._seed, self._step = seed, step
        self._next = self._others = 0

    @property
    def left(self) -> int:
        """The number of draws of the captured step that have not been made."""
        return len(self._draws) - self._next

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.weft.uniform.default:
            return self._uniform(tuple(args[0]), **kwargs)
        function = _random_ops().get(func)
        if function is not None:
            with self:
                made = function(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return func(*args, **kwargs)

    def _uniform(
        self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        salt = self._salt((size, dtype))
        return uniform(
            self._seed, self._step, size, [0] * len(size), size, salt, dtype=dtype, device=device
        )

    def _salt(self, draw: _Draw) -> int:
        """The number of a draw in the captured step, which leaves out what nobody reads."""
        if self.left and self._draws[self._next] == draw:
            self._next += 1
            return self._next - 1
        self._others += 1
        return -self._others


@cache
def _random_ops() -> Decompositions:
    """Ops that draw, and their backwards, as capture takes them apart."""
    functions = {id(each) for each in (*random.TABLE.values(), *sampling.TABLE.values())}
    return {op: each for op, each in decompositions().items() if id(each) in functions}


def _size(arg: Any) -> tuple[int, ...]:
    return tuple(int(each) for each in arg)


def _dtype(call: Call) -> str:
    name: str = dict(call.kwargs)["dtype"].name  # type: ignore[union-attr]
    return name
