"""Sample calls of the ops between a micro-batch and the step."""

from __future__ import annotations

from collections.abc import Iterator

from ops.draw import f
from tools.oracles.rules import TorchCall, torch_call


def of_one_micro_batch() -> Iterator[TorchCall]:
    yield torch_call("weft.accumulate", f(5, 4), "sum")
    yield torch_call("weft.accumulate", f(5, 4), "max")
    yield torch_call("weft.pack", f(5, 4), 0)
    yield torch_call("weft.slice", f(6, 4), 0, 2, 2)
    yield torch_call("weft.use", f(5, 4), 0)


FAMILIES = (of_one_micro_batch,)
