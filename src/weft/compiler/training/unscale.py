"""Gradients divided by the loss scale of float16, and updates that are skipped when one overflows.

Before: optimizers read scaled gradients. After: they read them divided by the scale. A step with a gradient that is
infinite or not a number, on any rank of any stage, updates nothing and halves the scale (`loss_scale.py`).
"""

from __future__ import annotations

from dataclasses import replace

from weft.compiler.context import Context
from weft.compiler.training.gradients import Scalars, by_optimizer, gradients, with_sources
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


def unscale(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """Divide gradients by the loss scale, if there is one, and skip updates when one overflows."""
    if SCALE not in graph.values:
        return graph
    found = gradients(graph)
    new = Scalars("scaled")
    flags = [
        (
            new.call("weft.nonfinite", (Ref(each.value.name),), each.value.name, each.phase),
            each.phase,
        )
        for each in found
    ]
    overflow = new.total("aten.amax.default", flags, "overflow")
    first = Phase(min(each.phase.stage for each in found), "backward")
    inverse = new.call("aten.reciprocal.default", (Ref(SCALE),), "inverse", first)
    sources = {each.target: new.scaled(each, inverse) for each in found}
    made = (Value("scaled.scale", (), "float32"), Value("scaled.growth_tracker", (), "int32"))
    args = (Ref(SCALE), Ref(TRACKER), overflow)
    new.calls.append(Call("weft.next_scale", args, (), made, phase=first))
    return _skipping(with_sources(graph, new.calls, sources), overflow, made)


def _skipping(graph: LogicalGraph, overflow: Ref, made: tuple[Value, Value]) -> LogicalGraph:
    """The graph whose optimizers skip their updates on overflow, and with updates of the scale."""
    nodes = [
        replace(node, skip=overflow) if isinstance(node, Update) and by_optimizer(node) else node
        for node in graph.nodes
    ]
    copies = [
        Update("copy", Ref(key), Ref(value.name))
        for key, value in zip((SCALE, TRACKER), made, strict=True)
    ]
    end = next((i for i, node in enumerate(nodes) if isinstance(node, Output)), len(nodes))
    return replace(graph, nodes=(*nodes[:end], *copies, *nodes[end:]))
