"""Dynamic loss scaling for float16, as `torch.amp.GradScaler` does it.

The gradient of the loss starts from the scale, a state of the program, so that small gradients do not vanish;
`unscale.py` divides by it before the optimizers run. Before: as captured, it starts from a seed. After: from the
scale.
"""

from __future__ import annotations

from dataclasses import replace

from weft.compiler.context import Context
from weft.ir.logical import (
    Call,
    Input,
    LogicalGraph,
    Node,
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
    scale = Value(SCALE, (), "float32")
    states = (
        Input(scale, "state", SCALE),
        Input(Value(TRACKER, (), "int32"), "state", TRACKER),
    )
    inputs = sum(isinstance(node, Input) for node in graph.nodes)
    nodes: list[Node] = [*graph.nodes[:inputs], *states]
    for node in graph.nodes[inputs:]:
        if isinstance(node, Call) and node.op == SEED:
            ones = tuple(
                value and replace(value, name=f"{value.name}.ones") for value in node.outputs
            )
            nodes.append(node.changed(op="aten.ones_like.default", outputs=ones))
            args = (ones[0].ref, scale.ref)  # type: ignore[union-attr]
            node = node.changed(op="weft.scale", args=args)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
