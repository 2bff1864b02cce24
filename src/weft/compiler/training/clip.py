"""The norm of all gradients together, whatever their layouts and stages: clip by it, or tell it.

Before: updates by gradients. After: by gradients times `min(1, max_norm / (norm + 1e-6))`, as
`torch.nn.utils.clip_grad_norm_` does it between backward and the optimizer's step; the metric
"grad_norm" is the norm before clipping. The squares of a split gradient are summed where its shards
lie; only numbers travel.

Gradients are divided by the loss scale of float16 first; a step with one that is infinite or not a number, on any rank
of any stage, updates nothing and halves the scale (`loss_scale.py`).
"""

from __future__ import annotations

from dataclasses import replace

from weft.compiler.context import Context
from weft.compiler.training.gradients import (
    Gradient,
    Scalars,
    by_optimizer,
    gradients,
    with_sources,
)
from weft.compiler.training.loss_scale import SCALE, TRACKER
from weft.ir.logical import (
    Call,
    LogicalGraph,
    Output,
    Phase,
    Ref,
    Update,
    Value,
)
from weft.ops.call import Token

# What keys of outputs begin with that the loss function did not return.
METRIC = "metric:"


def clip_norm(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """Let optimizers read gradients that are scaled to a global norm of at most `Options.clip_norm`.

    With the metric "grad_norm", the norm is one more output.

    Args:
        graph: without layouts.
        context: with the largest norm, None for any; the metrics; and where parameters live.
    """
    max_norm = context.options.clip_norm
    found = gradients(graph, context.stages.homes)
    measured = "grad_norm" in context.options.metrics
    if not found or (max_norm is None and not measured):
        return graph
    double = any(each.value.dtype in ("float64", "complex128") for each in found)
    new = Scalars("clip", "float64" if double else "float32")
    dtype = Token("dtype", new.dtype)
    squares = [(_square(new, each, dtype), each.phase) for each in found]
    total = new.total("aten.sum.default", squares, "square")
    first = Phase(min(each.phase.stage for each in found), "backward")
    norm = new.call("aten.sqrt.default", (total,), "norm", first) if measured else None
    sources = {}
    if max_norm is not None:
        factor = new.call("weft.clip_factor", (total, max_norm), "factor", first)
        sources = {each.target: new.scaled(each, factor) for each in found}
    graph = with_sources(graph, new.calls, sources)
    if norm is None:
        return graph
    return replace(graph, nodes=(*graph.nodes, Output(norm, f"{METRIC}grad_norm")))


def _square(new: Scalars, gradient: Gradient, dtype: Token) -> Ref:
    args = (gradient.value.ref, dtype)
    return new.call("weft.square_sum", args, gradient.value.name, gradient.phase)


def unscale(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """Divide gradients by the loss scale, if there is one, and skip updates when one overflows."""
    if SCALE not in graph.values:
        return graph
    found = gradients(graph)
    new = Scalars("scaled")
    flags = [
        (
            new.call("weft.nonfinite", (each.value.ref,), each.value.name, each.phase),
            each.phase,
        )
        for each in found
    ]
    overflow = new.total("aten.amax.default", flags, "overflow")
    first = Phase(min(each.phase.stage for each in found), "backward")
    inverse = new.call("aten.reciprocal.default", (graph.values[SCALE].ref,), "inverse", first)
    sources = {each.target: new.scaled(each, inverse) for each in found}
    made = (Value("scaled.scale", (), "float32"), Value("scaled.growth_tracker", (), "int32"))
    args = (graph.values[SCALE].ref, graph.values[TRACKER].ref, overflow)
    new.calls.append(Call.of("weft.next_scale", args, made, phase=first))
    return _skipping(with_sources(graph, new.calls, sources), overflow, made)


def _skipping(graph: LogicalGraph, overflow: Ref, made: tuple[Value, Value]) -> LogicalGraph:
    """The graph whose optimizers skip their updates on overflow, and with updates of the scale."""
    nodes = [
        replace(node, skip=overflow) if isinstance(node, Update) and by_optimizer(node) else node
        for node in graph.nodes
    ]
    copies = [
        Update("copy", Ref(key), value.ref)
        for key, value in zip((SCALE, TRACKER), made, strict=True)
    ]
    end = next((i for i, node in enumerate(nodes) if isinstance(node, Output)), len(nodes))
    return replace(graph, nodes=(*nodes[:end], *copies, *nodes[end:]))
