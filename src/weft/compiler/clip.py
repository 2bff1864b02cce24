"""Clip gradients by the norm of all of them together, whatever their layouts and stages.

Before: updates by gradients. After: by gradients times `min(1, max_norm / (norm + 1e-6))`, as
`torch.nn.utils.clip_grad_norm_` does it between backward and the optimizer's step. The squares of a
split gradient are summed where its shards lie; only numbers travel.
"""

from __future__ import annotations

from weft.compiler.gradients import Gradient, Scalars, gradients, with_sources
from weft.ir.logical import LogicalGraph, Phase, Ref
from weft.ops.call import Token


def clip_norm(graph: LogicalGraph, max_norm: float | None) -> LogicalGraph:
    """Let optimizers read gradients that are scaled to a global norm of at most `max_norm`."""
    found = gradients(graph)
    if max_norm is None or not found:
        return graph
    double = any(each.value.dtype in ("float64", "complex128") for each in found)
    new = Scalars("clip", "float64" if double else "float32")
    dtype = Token("dtype", new.dtype)
    squares = [(_square(new, each, dtype), each.phase) for each in found]
    total = new.total("aten.sum.default", squares, "square")
    first = Phase(min(each.phase.stage for each in found), "backward")
    factor = new.call("weft.clip_factor", (total, max_norm), "factor", first)
    sources = {each.target: new.scaled(each, factor) for each in found}
    return with_sources(graph, new.calls, sources)


def _square(new: Scalars, gradient: Gradient, dtype: Token) -> Ref:
    args = (Ref(gradient.value.name), dtype)
    return new.call("weft.square_sum", args, gradient.value.name, gradient.phase)
