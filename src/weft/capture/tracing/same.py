"""Compare two traces, which are the same graph by ops, operands, numbers, and the values of constants."""

from __future__ import annotations

from typing import Any

import torch

from weft.capture.tracing.fx import is_fake


def same_graph(one: torch.fx.GraphModule, other: torch.fx.GraphModule) -> bool:
    """True where two traces of the same step compute the same from the same inputs."""
    first, second = list(one.graph.nodes), list(other.graph.nodes)
    numbers = [{node: i for i, node in enumerate(nodes)} for nodes in (first, second)]
    return len(first) == len(second) and all(
        a.op == b.op
        and _target(one, a, other, b)
        and _words(a, numbers[0]) == _words(b, numbers[1])
        for a, b in zip(first, second, strict=True)
    )


def _target(one: Any, a: torch.fx.Node, other: Any, b: torch.fx.Node) -> bool:
    if a.op == "call_function":
        return a.target is b.target
    if a.op != "get_attr":
        return True
    return _same_constant(getattr(one, a.target), getattr(other, b.target))  # type: ignore[arg-type]


def _same_constant(one: Any, other: Any) -> bool:
    """True where constants are the same tensor, or have the same values; parts of a graph, the same ops."""
    if one is other:
        return True
    if isinstance(one, torch.fx.GraphModule) and isinstance(other, torch.fx.GraphModule):
        return same_graph(one, other)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if is_fake(one) or is_fake(other) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other)


def _words(node: torch.fx.Node, numbers: dict[torch.fx.Node, int]) -> str:
    """The operands of a node, with numbers for nodes."""
    return repr(torch.fx.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}"))
