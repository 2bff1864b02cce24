"""Compare two traces, which are the same graph by ops, operands, numbers, and the values of constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.capture.tracing.fx import is_fake


def same_but_for(
    one: torch.fx.GraphModule, other: torch.fx.GraphModule, numbers: Mapping[int, Any]
) -> bool:
    """True where two traces compute the same, but that the second has tensors in place of numbers.

    Args:
        numbers: those that it has now, by the identities of the tensors.
    """
    given: dict[torch.fx.Node, Any] = {}
    for node in other.graph.find_nodes(op="get_attr"):
        tensor = getattr(other, node.target)
        if id(tensor) in numbers:
            given[node] = numbers[id(tensor)]
    first = list(one.graph.nodes)
    second = [node for node in other.graph.nodes if node not in given]
    pairs = list(zip(first, second, strict=False))
    place = [{node: i for i, node in enumerate(nodes)} for nodes in (first, second)]
    return len(first) == len(second) and all(
        a.op == b.op
        and (_packet(a) is _packet(b) if a.op == "call_function" else _target(one, a, other, b))
        and _words(a, place[0]) == _words(b, place[1], given)
        for a, b in pairs
    )


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


def _packet(node: torch.fx.Node) -> Any:
    """The op that a node calls, whichever overload."""
    return getattr(node.target, "overloadpacket", node.target)


def _words(
    node: torch.fx.Node,
    places: dict[torch.fx.Node, int],
    given: Mapping[torch.fx.Node, Any] | None = None,
) -> str:
    """The operands of a node, with places for nodes, or what is given for them."""
    given = given or {}
    name = lambda each: given[each] if each in given else f"%{places[each]}"  # noqa: E731
    return repr(torch.fx.map_arg((node.args, node.kwargs), name))
