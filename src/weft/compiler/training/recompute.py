"""Recompute: the backward computes parts of the forward again instead of keeping their results.

Before: backward calls read what forward calls of a region made. After: they read copies of these calls, which stand
right before their first reader. A region is a module that the user names, with all below it, or a set of ops. Inputs
and results of the module are kept; only values in between are recomputed (Chen et al. 2016, "Training deep nets with
sublinear memory cost").

Copies of random ops draw the same numbers, as they carry the same salts. So that nothing is made
again before its time, copies read what was kept through `weft.after`, which waits for the gradient
that the backward of the region starts from.

Regions come from patterns of modules and ops, and from checkpoints in the model's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from weft.cached import cached_property
from weft.compiler.context import Context
from weft.ir.logical import Call, LogicalGraph, Node, Output, Phase
from weft.ir.nodes import renamed
from weft.ops import shares_memory
from weft.patterns import around, check_named, first_match

# The region of all calls that a pattern of ops names; those of modules are called by their paths.
OPS = "ops"


AFTER = "weft.after"


def recompute(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """Let the backward make again what the forward made in the regions that `Options.recompute` names.

    Its patterns are of module paths ("blocks.*" is each block), or of ops ("aten.gelu.default").

    Raises:
        StrategyError: when a pattern names nothing.
    """
    region_of = regions(graph, context.options.recompute, context.options.modules)
    again = region_of.keys() - kept_values(graph, region_of)
    if not again:
        return graph
    walk = _RecomputeWalk(graph, {name: region_of[name] for name in again})
    for number, node in enumerate(graph.nodes):
        walk.add(number, node)
    return replace(graph, nodes=tuple(walk.nodes))


@final
@dataclass
class _RecomputeWalk:
    """The nodes so far, and what stands for a value in the backward.

    Attributes:
        region_of: for each value that is made again, its region.
        copies: the names of values that were made again.
        held: by region, the kept values as its copies read them.
        backward: the values that calls of the backward made so far, with the numbers of their
            nodes.
    """

    graph: LogicalGraph
    region_of: Mapping[str, str]
    nodes: list[Node] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    held: dict[tuple[str, str], str] = field(default_factory=dict)
    backward: dict[str, int] = field(default_factory=dict)

    @cached_property
    def number(self) -> dict[str, int]:
        """The number of the node that makes each value."""
        return {
            value.name: number
            for number, node in enumerate(self.graph.nodes)
            for value in node.makes
        }

    def add(self, number: int, node: Node) -> None:
        if isinstance(node, Call) and node.phase.kind != "forward":
            missing = self._missing(node)
            # The gradient that the backward of the region starts from: the last value made before `node` among what
            # the backward reads first: `node` itself, or else the calls after it.
            reads = (
                [name for name in later.uses if name in self.backward]
                for later in self.graph.nodes[number:]
                if isinstance(later, Call) and later.phase == node.phase
            )
            first = next(filter(None, reads), []) if missing else []
            awaited = max(first, key=self.backward.__getitem__, default=None)
            for place in sorted(missing):
                call = self.graph.nodes[place]
                assert isinstance(call, Call)  # only calls are made again
                phase = Phase(call.phase.stage, node.phase.kind)
                names = {name: self._read(name, call, awaited, phase) for name in call.uses}
                outputs = tuple(v and replace(v, name=f"{v.name}.again") for v in call.outputs)
                copy = call.changed(outputs=outputs, phase=phase)
                self.nodes.append(renamed(copy, names))
                self.copies.update((v.name, f"{v.name}.again") for v in call.makes)
            node = renamed(node, self.copies)
            self.backward.update((value.name, number) for value in node.makes)
        self.nodes.append(node)

    def _missing(self, reader: Call) -> set[int]:
        found: set[int] = set()
        waiting = list(reader.uses)
        while waiting:
            name = waiting.pop()
            if name in self.region_of and name not in self.copies:
                place = self.number[name]
                if place not in found:
                    found.add(place)
                    waiting += self.graph.nodes[place].uses
        return found

    def _read(self, name: str, call: Call, awaited: str | None, phase: Phase) -> str:
        """The name that the copy of `call` reads in place of `name`."""
        region = self.region_of[call.makes[0].name]
        if name in self.copies:
            return self.copies[name]
        if awaited is None or not isinstance(self.graph.producers[name], Call):
            return name
        if (region, name) not in self.held:
            value = replace(self.graph.values[name], name=f"{name}.held{len(self.held)}")
            args = (self.graph.values[name].ref, self.graph.values[awaited].ref)
            self.nodes.append(Call.of(AFTER, args, (value,), location=call.location, phase=phase))
            self.held[region, name] = value.name
        return self.held[region, name]


def regions(
    graph: LogicalGraph, patterns: Sequence[str], modules: Sequence[str] = ()
) -> dict[str, str]:
    """The region of each value that can be made again; patterns may also name one of `modules`.

    Raises:
        StrategyError: when a pattern names neither a module nor an op of the forward.
    """
    forward = [call for call in graph.of_kind(Call) if call.phase.kind == "forward"]
    paths = {path for call in forward for path in around(call.module)} | set(modules)
    known = paths | {call.op for call in forward}
    for pattern in patterns:
        check_named(f"recompute=[{pattern!r}]", pattern, known, "modules and ops of the forward")
    found: dict[str, str] = {}
    for call in forward:
        # The outermost module around the call that a pattern names, or its checkpoint; `OPS` when one names its op.
        named = (path for path in around(call.module) if first_match(patterns, path) is not None)
        region = next(named, None)
        if region is None and call.location is not None and call.location.checkpoint is not None:
            region = f"checkpoint {call.location.checkpoint}"
        if region is None and first_match(patterns, call.op) is not None:
            region = OPS
        if region is None and shares_memory(call.op) and found.get(call.uses[0]) == OPS:
            region = OPS  # a view of what is made again would keep it
        found.update((value.name, region) for value in call.makes if region is not None)
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
            here = next((region_of.get(value.name) for value in node.makes), None)
            kept |= {name for name in node.uses if region_of.get(name, OPS) not in (here, OPS)}
            made = {value.name for value in node.makes}
            if made & kept:
                kept |= made  # a call is made again as a whole, or not at all
                kept.update(node.uses[:1] if shares_memory(node.op) else ())
    return frozenset(kept)
