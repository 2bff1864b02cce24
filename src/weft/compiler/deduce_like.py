"""Layouts for another shape of the batch: those of a graph that was deduced, where they fit and cost about as little.

Deductions of graphs that are alike (`weft.compiler.alike`) are the same problem with other costs, which grow and
shrink with the sizes. While no tensor is more than `NEAR` times as large or as small, what was cheapest is still
about the cheapest: it is taken over, when the rule of every call allows it and no rank is left without elements.
Everything else is deduced anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from weft.compiler.alike import Match, match
from weft.compiler.assignment import Assignment
from weft.compiler.calls import op_call, operand_names
from weft.compiler.families.class_split import legal_signatures
from weft.compiler.hints import Hints, Thin, enough_elements, is_hint
from weft.compiler.layouts.options import PerAxis, all_have_elements
from weft.compiler.layouts.thin import ThinSplits, thin_splits
from weft.errors import RuleError
from weft.ir.logical import Call, Input, LogicalGraph
from weft.ir.nodes import node_uses
from weft.layout import Broadcast, Layout, Placement
from weft.ops import OpCall, Signature, localize

_NONE: Thin = frozenset()


@dataclass(frozen=True)
class Solved:
    """A deduction: what `weft.compiler.layouts.deduce.deduce` was given, and what it found."""

    graph: LogicalGraph
    hints: Hints
    placement: Placement
    coming: Mapping[str, bool]
    assignment: Assignment

    def taken(
        self, graph: LogicalGraph, hints: Hints, placement: Placement, coming: Mapping[str, bool]
    ) -> Assignment | None:
        """The layouts for a graph of other sizes; None where it is not alike, or they do not fit it.

        Args:
            graph, hints, placement, coming: as `deduce` takes them. Hints may fix more inputs than before.
        """
        if (placement, coming) != (self.placement, self.coming) or not self._allowed(hints):
            return None
        found = match(self.graph, graph)
        if found is None or not self._slices_whole(found):
            return None
        assignment = self._renamed(graph, found)
        return assignment if _fits(graph, hints, placement, assignment) else None

    def _slices_whole(self, found: Match) -> bool:
        """Whether slices that only one of the graphs has are of what every rank holds whole."""
        shared, values = self.assignment.shared, self.assignment.values
        return not any(
            name in shared or set(values[name].sbp) != {Broadcast()} for name in found.sliced
        )

    def _renamed(self, graph: LogicalGraph, found: Match) -> Assignment:
        """The same layouts, for the values and nodes of a graph."""
        before, names = self.assignment, found.names
        values = {name: before.values[other] for name, other in names.items()}
        operands = {}
        for number, (node, other) in enumerate(zip(graph.nodes, found.numbers, strict=True)):
            if other is None:
                operands[number] = tuple(values[name] for name in node_uses(node))
            elif other in before.operands:
                operands[number] = before.operands[other]
        shared = {name: before.shared[o] for name, o in names.items() if o in before.shared}
        return replace(before, values=values, operands=operands, shared=shared, taken=True)

    def _allowed(self, hints: Hints) -> bool:
        """Whether every input lies as hints say, and none that they fixed before has become free."""
        before, values = self.hints, self.assignment.values
        if hints.stored != before.stored or not before.inputs.keys() <= hints.inputs.keys():
            return False
        return all(
            wanted in (None, sbp)
            for node in self.graph.of_kind(Input)
            if node.key in hints.inputs
            for wanted, sbp in zip(hints.inputs[node.key], values[node.value.name].sbp, strict=True)
        )


def _fits(graph: LogicalGraph, hints: Hints, placement: Placement, assignment: Assignment) -> bool:
    """Whether the rules allow the layouts, and every rank has a part of what is split."""
    grid, thin = placement.shape, thin_splits(graph, hints, placement)
    for value in (node.value for node in graph.of_kind(Input)):
        sbps = assignment.values[value.name].sbp
        if not enough_elements(value.shape, sbps, grid, thin.get(value.name, _NONE)):
            return False
    # Equal calls, such as those of repeated layers, are looked at once.
    return all(_legal(*each, grid) for each in dict.fromkeys(_calls(graph, assignment, thin)))


def _calls(
    graph: LogicalGraph, assignment: Assignment, thin: ThinSplits
) -> Iterator[tuple[OpCall, tuple[Layout | None, ...], int, tuple[Thin, ...]]]:
    """Each call, the layouts of its operands and then its results, how many these are; and what is thin."""
    for number, node in enumerate(graph.nodes):
        if isinstance(node, Call) and not is_hint(node):
            made = [value.name if value else "" for value in node.outputs]
            layouts = (*assignment.operands[number], *map(assignment.values.get, made))
            names = (*operand_names(node), *made) if thin else ()
            ports = tuple([thin.get(name, _NONE) for name in names])
            yield op_call(graph, node), layouts, len(made), ports if any(ports) else ()


def _legal(
    call: OpCall,
    layouts: tuple[Layout | None, ...],
    results: int,
    thin: tuple[Thin, ...],
    grid: tuple[int, ...],
) -> bool:
    """Whether the rule of a call allows the layouts of its operands and results, axis by axis."""
    signatures = tuple(_signatures(layouts, results, len(grid)))
    if not all_have_elements(call, signatures, grid, thin):
        return False
    try:
        for signature, parts in zip(signatures, grid, strict=True):
            if signature not in legal_signatures(call, parts, bool(thin)):
                return False
            call = localize(call, signature, parts, 0)
    except RuleError:
        return False
    return True


def _signatures(layouts: tuple[Layout | None, ...], results: int, axes: int) -> PerAxis:
    """One for each axis of the grid."""
    by_axis = ([one.sbp[axis] if one else Broadcast() for one in layouts] for axis in range(axes))
    split = len(layouts) - results
    return tuple([Signature(tuple(sbps[:split]), tuple(sbps[split:])) for sbps in by_axis])
