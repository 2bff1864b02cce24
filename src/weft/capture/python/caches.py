"""Tensors that a step keeps in the model for later steps: those that never change may, others are refused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx.graph import CodeGen

from weft.errors import CaptureError

# Ops that take no value from their operand, only its shape and dtype.
_KINDS = ("zeros", "ones", "full", "empty")
_OF_SHAPES = frozenset([f"new_{kind}" for kind in _KINDS] + [f"{kind}_like" for kind in _KINDS])


def take_caches(graph: torch.fx.Graph, names: Sequence[str]) -> None:
    """Take the last outputs of a trace, which are what the step keeps, out of it.

    A cache that is made of nothing but constants, such as positions, is the same in every step; the
    graph makes it each time.

    Args:
        graph: whose output is a list; its last entries are caches.
        names: of the caches, as the user knows them.

    Raises:
        CaptureError: naming a cache that depends on the batch or on variables.
    """
    if not names:
        return
    output = next(iter(reversed(graph.nodes)))
    results = list(output.args[0])
    first = len(results) - len(names)
    for name, cache in zip(names, results[first:], strict=True):
        if isinstance(cache, torch.fx.Node) and _depends(cache):
            raise CaptureError(
                f"the step keeps in {name} a tensor that depends on the batch or on the model's tensors, for the next "
                "step to read: captured once, it would be made anew in every step. Register a buffer of its shape, "
                "and write it there"
            )
    output.args = (results[:first],)
    graph.set_codegen(CodeGen())  # the other one checks how many results there are
    graph.eliminate_dead_code()


def _depends(cache: torch.fx.Node) -> bool:
    """True where a value depends on an input of the graph."""
    waiting, seen = [cache], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            return True
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        waiting += () if name in _OF_SHAPES else node.all_input_nodes
    return False
