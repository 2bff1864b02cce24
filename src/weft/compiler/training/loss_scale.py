"""Dynamic loss scaling for float16, as `torch.amp.GradScaler` does it.

The gradient of the loss starts from the scale, a state of the program, so that small gradients do
not vanish. Before the optimizers run, gradients are divided by it. A step with a gradient that is
infinite or not a number, on any rank of any stage, updates nothing and halves the scale.
"""

from __future__ import annotations

from dataclasses import replace

from weft.compiler.context import Context
from weft.compiler.training.gradients import Scalars, by_optimizer, gradients, with_sources
from weft.ir.logical import (
    Call,
    Input,
    LogicalGraph,
    Node,
    Output,
    Phase,
    Ref,
    Update,
    Value,
)

SEED = "weft.loss_seed"
# Keys of the states, and what they start with.
SCALE, TRACKER = "grad_scaler.scale", "grad_scaler.growth_tracker"
FIRST_VALUES = {SCALE: 65536.0, TRACKER: 0}


def scale_loss(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """Let gradients start from the scale where, as captured for float16, they start from a seed."""
    if not any(call.op == SEED for call in graph.of_kind(Call)):
        return graph
    states = (
        Input(Value(SCALE, (), "float32"), "state", SCALE),
        Input(Value(TRACKER, (), "int32"), "state", TRACKER),
    )
    inputs = sum(isinstance(node, Input) for node in graph.nodes)
    nodes: list[Node] = [*graph.nodes[:inputs], *states]
    for node in graph.nodes[inputs:]:
        if isinstance(node, Call) and node.op == SEED:
            ones = tuple(
                value and replace(value, name=f"{value.name}.ones") for value in node.outputs
            )
            nodes.append(replace(node, op="aten.ones_like.default", outputs=ones))
            args = (Ref(ones[0].name), Ref(SCALE))  # type: ignore[union-attr]
            node = replace(node, op="weft.scale", args=args)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


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
