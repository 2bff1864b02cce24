"""Tensors that a step keeps in the model for later steps: those that never change may, others are refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch.fx.graph import CodeGen

from weft.capture.fx.private import root_of, written_in
from weft.errors import CaptureError

# Ops that take no value from their operand, only its shape and dtype.
_KINDS = ("zeros", "ones", "full", "empty")
_OF_SHAPES = frozenset([f"new_{kind}" for kind in _KINDS] + [f"{kind}_like" for kind in _KINDS])
_DRAWS = "weft.uniform.default"


@final
@dataclass(frozen=True)
class Cache:
    """A tensor that a step keeps in an attribute, by the user's name of it.

    Attributes:
        now: the tensor.
        before: that which stood there and was read; None where there was none.
    """

    text: str
    now: torch.Tensor
    before: torch.Tensor | None


def take_caches(
    module: torch.fx.GraphModule, caches: Sequence[Cache], dependent: Collection[torch.fx.Node]
) -> None:
    """Take the last outputs of a trace, which are what the step keeps, out of it.

    A cache that is made of nothing but constants, such as positions, is the same in every step; the
    graph makes it each time.

    Args:
        module: whose output is a list; its last entries are caches.
        caches: in order.
        dependent: nodes that are made of more than constants (`depending`).

    Raises:
        CaptureError: naming a cache that depends on the batch, on variables or on random numbers, or takes the place
            of a tensor that the step computes with.
    """
    graph = module.graph
    constants = {
        id(getattr(module, node.target)) for node in graph.find_nodes(op="get_attr") if node.users
    }
    output = next(iter(reversed(graph.nodes)))
    results = list(output.args[0])
    first = len(results) - len(caches)
    for cache, node in zip(caches, results[first:], strict=True):
        if id(cache.before) in constants:
            raise CaptureError(
                f"the step computes with the tensor in {cache.text}, and puts another one there, for the next step: "
                "captured once, it would read the same one for ever. Register a buffer, and write it in place"
            )
        if node in dependent:
            raise CaptureError(
                f"the step keeps in {cache.text} a tensor that depends on the batch, on the model's tensors or on "
                "random numbers, for the next step to read: captured once, it would be made anew in every step. "
                "Register a buffer of its shape, and write it there"
            )
    output.args = (results[:first],)
    graph.set_codegen(CodeGen())  # the other one checks how many results there are
    graph.eliminate_dead_code()


def depending(graph: torch.fx.Graph, inputs: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """The nodes whose values depend on some inputs of a graph or on random numbers, by way of writes in place, too."""
    found = set(inputs)
    written: set[torch.fx.Node] = set()
    for node in graph.nodes:
        read = () if _of_shapes(node) else node.all_input_nodes
        again = bool(written) and any(root_of(each) in written for each in read)
        if again or not found.isdisjoint(read) or draws(node):
            found.add(node)
            written |= {root for root in written_in(node) if root not in found}
    if written:  # views that were made before that
        found |= {node for node in graph.nodes if root_of(node) in written}
    return found


def draws(node: torch.fx.Node) -> bool:
    """True where a node gives random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    seeded = torch.Tag.nondeterministic_seeded in node.target.tags
    return seeded or str(node.target) == _DRAWS


def _of_shapes(node: torch.fx.Node) -> bool:
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return name in _OF_SHAPES
