"""Regions of the forward that are made again in the backward, and what they hold that is kept all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.ir.logical import Call, LogicalGraph, Output, node_outputs, node_uses
from weft.ops import shares_memory
from weft.patterns import around, check_named, first_match

# The region of all calls that a pattern of ops names; those of modules are called by their paths.
OPS = "ops"


def regions(
    graph: LogicalGraph, patterns: Sequence[str], modules: Sequence[str] = ()
) -> dict[str, str]:
    """The region of each value that can be made again; patterns may also name one of `modules`.

    Raises:
        StrategyError: when a pattern names neither a module nor an op of the forward.
    """
    forward = [call for call in graph.of_kind(Call) if call.phase.kind == "forward"]
    paths = {path for call in forward for path in around(_module(call))} | set(modules)
    known = paths | {call.op for call in forward}
    for pattern in patterns:
        check_named(f"recompute=[{pattern!r}]", pattern, known, "modules and ops of the forward")
    found: dict[str, str] = {}
    for call in forward:
        region = _region(call, patterns)
        if region is None and shares_memory(call.op) and found.get(node_uses(call)[0]) == OPS:
            region = OPS  # a view of what is made again would keep it
        found.update((value.name, region) for value in node_outputs(call) if region is not None)
    return found


def kept_values(graph: LogicalGraph, region_of: Mapping[str, str]) -> frozenset[str]:
    """The values of regions that are there in the backward anyway.

    These are what a module hands on to other calls of the forward, and what the step returns; and
    what they are views of.
    """
    kept: set[str] = set()
    for node in reversed(graph.nodes):
        if isinstance(node, Output):
            kept.add(node.value.name)
        elif isinstance(node, Call) and node.phase.kind == "forward":
            kept |= _taken(node, region_of)
            made = {value.name for value in node_outputs(node)}
            if made & kept:
                kept |= made  # a call is made again as a whole, or not at all
                kept.update(node_uses(node)[:1] if shares_memory(node.op) else ())
    return frozenset(kept)


def _taken(call: Call, region_of: Mapping[str, str]) -> set[str]:
    """The values that a call takes from the regions of other modules."""
    here = next((region_of.get(value.name) for value in node_outputs(call)), None)
    return {name for name in node_uses(call) if region_of.get(name, OPS) not in (here, OPS)}


def _region(call: Call, patterns: Sequence[str]) -> str | None:
    """The outermost module around a call that a pattern names, or its checkpoint; `OPS` when one names its op."""
    for path in around(_module(call)):
        if first_match(patterns, path) is not None:
            return path
    if call.location is not None and call.location.checkpoint is not None:
        return f"checkpoint {call.location.checkpoint}"
    return OPS if first_match(patterns, call.op) is not None else None


def _module(call: Call) -> str:
    return call.location.module if call.location else ""
