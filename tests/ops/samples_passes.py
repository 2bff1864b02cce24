"""Sample calls of the ops that passes put into a graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops.draw import f
from tools.oracles.rules import TorchCall, torch_call


def of_gradients() -> Iterator[TorchCall]:
    yield torch_call("weft.square_sum", f(5, 4), torch.float64)
    yield torch_call("weft.nonfinite", f(5, 4))
    yield torch_call("weft.nonfinite", f(5, 4) / 0.0)
    yield torch_call("weft.scale", f(5, 4), f())
    yield torch_call("weft.cast_parts", f(5, 4), torch.float64)
    yield torch_call("weft.cast_whole", f(5, 4), torch.float64)
    yield torch_call("weft.take", f(5, 4), "S(0)", 0)
    steps = torch.tensor(1999, dtype=torch.int32)
    for overflow in (0.0, 1.0):
        flag = torch.tensor(overflow)
        yield torch_call("weft.next_scale", torch.tensor(1024.0), steps, flag)
    yield torch_call("weft.offload", f(5, 4))
    yield torch_call("weft.load", f(5, 4), torch.device("cpu"), f(6))
    yield torch_call("weft.required", f(5, 4), torch.tensor(True), "a check")
    yield torch_call("weft.after", f(5, 4), f(6))
    yield torch_call("weft.clip_factor", f().abs(), 0.5)


FAMILIES = (of_gradients,)
