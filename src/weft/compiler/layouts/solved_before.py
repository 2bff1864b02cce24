"""Graphs that are alike: the same nodes read the same values, and only sizes differ.

A slice of all rows is none: where a table of positions is as long as the batch, one graph has no slice and the
other has one. So a slice that only one of them has stands for what it is taken from.

Deductions of such graphs are the same problem with other costs, which grow and shrink with the sizes.
While no tensor is more than `NEAR` times as large or as small, what was cheapest is still about the
cheapest: it is taken over, when the rule of every call allows it and no rank is left without elements.
Everything else is deduced again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import final

from weft.compiler.assignment import Assignment
from weft.compiler.decompositions.table import legal_signatures
from weft.compiler.hints import Hints, Thin, enough_elements, is_hint
from weft.compiler.layouts.empty_shards import ThinSplits, splits_with_empty_shards
from weft.compiler.layouts.options import PerAxis, all_have_elements
from weft.errors import RuleError
from weft.ir.logical import Call, Input, LogicalGraph, Node, Output, Update, Value
from weft.layout import Broadcast, Layout, Placement
from weft.ops import OpCall, Signature, localize

# A tensor may be so many times as large or as small.
NEAR = 2
_SLICE = "aten.slice.Tensor"


@final
@dataclass
class Match:
    """The correspondence between the nodes of a graph and those of one that is alike.

    Attributes:
        names: for each value of the graph, the other's; for a slice that the other has not, what it is of.
        numbers: for each node of the graph, the other's number; None for such a slice.
        sliced: values of the other graph of which slices stand in only one of them, and its own such slices.
    """

    names: dict[str, str] = field(default_factory=dict)
    numbers: list[int | None] = field(default_factory=list)
    sliced: set[str] = field(default_factory=set)
    _of: dict[str, str] = field(default_factory=dict)

    def add(self, number: int, one: Node, other: Node) -> bool:
        """Let node `number` of the other graph, `one`, be `other` of the graph, if it does the same."""
        made, makes = _results(one), _results(other)
        if not self._same(one, other) or [*map(bool, made)] != [*map(bool, makes)]:
            return False
        self.numbers.append(number)
        self.names.update((b, a) for a, b in zip(made, makes, strict=True) if b)
        return True

    def add_slice(self, node: Node) -> None:
        """Note a slice that the other graph lacks."""
        (read,), (made,) = node.uses, node.makes
        self.names[made.name] = self.names[read]
        self.sliced.add(self.names[read])
        self.numbers.append(None)

    def skip_slice(self, node: Node) -> None:
        """Note a slice that only the other graph has."""
        (read,), (made,) = node.uses, node.makes
        self._of[made.name] = self._of.get(read, read)
        self.sliced.update((read, made.name))

    def _same(self, one: Node, other: Node) -> bool:
        """True where two nodes do the same with the same values, whatever sizes and numbers they have."""
        work = _work(one)
        return work is not None and work == _work(other) and self._reads(_read(one), _read(other))

    def _reads(self, before: tuple[str, ...], now: tuple[str, ...]) -> bool:
        of = self._of
        return [of.get(name, name) for name in before] == [
            of.get(self.names[name], self.names[name]) for name in now
        ]


def _work(node: Node) -> tuple[object, ...] | None:
    """The work of a node apart from sizes, numbers and operands; None for boxing."""
    match node:
        case Call():
            return "call", node.op, node.phase, node.hint
        case Input():
            return "input", node.role, node.key, node.shares, node.cut, node.sent
        case Update():
            return "update", node.rule, node.group, node.elementwise, bool(node.skip)
        case Output():
            return "output", node.key
    return None


def _results(node: Node) -> tuple[str, ...]:
    return node.output_names if isinstance(node, Call) else tuple(v.name for v in node.makes)


def _is_slice(node: Node) -> bool:
    return isinstance(node, Call) and node.op == _SLICE


def _read(node: Node) -> tuple[str, ...]:
    return node.operands if isinstance(node, Call) else node.uses


def match(before: LogicalGraph, graph: LogicalGraph) -> Match | None:
    """The match of a graph with another one; None where they are not alike, or their sizes are not close."""
    found, number, every = Match(), 0, before.nodes
    if before.micro_batches != graph.micro_batches:
        return None
    for node in graph.nodes:
        while number < len(every) and _is_slice(every[number]) and not _is_slice(node):
            found.skip_slice(every[number])
            number += 1
        if number < len(every) and found.add(number, every[number], node):
            number += 1
        elif _is_slice(node):
            found.add_slice(node)
        else:
            return None
    if number < len(every):
        return None
    pairs = (
        pair
        for other, node in zip(found.numbers, graph.nodes, strict=True)
        if other is not None
        for pair in zip(every[other].makes, node.makes, strict=True)
    )
    return found if _near(pairs) else None


def _near(pairs: Iterable[tuple[Value, Value]]) -> bool:
    for dtype, shape, other, now in {(a.dtype, a.shape, b.dtype, b.shape) for a, b in pairs}:
        least, most = sorted((prod(shape), prod(now)))
        if dtype != other or len(shape) != len(now) or most > NEAR * least:
            return False
    return True


_NONE: Thin = frozenset()


@final
@dataclass(frozen=True)
class Solved:
    """A deduction: what `weft.compiler.layouts.box.deduce` was given, and what it found."""

    graph: LogicalGraph
    hints: Hints
    placement: Placement
    assignment: Assignment

    def taken(self, graph: LogicalGraph, hints: Hints, placement: Placement) -> Solved | None:
        """The layouts for a graph of other sizes; None where it is not alike, or they do not fit it."""
        if placement != self.placement or not self._allowed(hints):
            return None
        found = match(self.graph, graph)
        if found is None or not self._slices_whole(found):
            return None
        assignment = self._renamed(graph, found)
        fits = _fits(graph, hints, placement, assignment)
        return Solved(graph, hints, placement, assignment) if fits else None

    def _slices_whole(self, found: Match) -> bool:
        """True where slices that only one of the graphs has are of values that every rank holds whole."""
        shared, values = self.assignment.shared, self.assignment.values
        return not any(
            name in shared or set(values[name].sbp) != {Broadcast()} for name in found.sliced
        )

    def _renamed(self, graph: LogicalGraph, found: Match) -> Assignment:
        before, names = self.assignment, found.names
        values = {name: before.values[other] for name, other in names.items()}
        operands = {}
        for number, (node, other) in enumerate(zip(graph.nodes, found.numbers, strict=True)):
            if other is None:
                operands[number] = tuple(values[name] for name in node.uses)
            elif other in before.operands:
                operands[number] = before.operands[other]
        shared = {name: before.shared[o] for name, o in names.items() if o in before.shared}
        return replace(before, values=values, operands=operands, shared=shared, taken=True)

    def _allowed(self, hints: Hints) -> bool:
        """True where every input lies as hints say, and none that they fixed before has become free."""
        before, values = self.hints, self.assignment.values
        if (hints.stored, hints.signatures, hints.whole) != (
            before.stored,
            before.signatures,
            before.whole,
        ):
            return False
        if not before.inputs.keys() <= hints.inputs.keys():
            return False
        return all(
            wanted in (None, sbp)
            for node in self.graph.of_kind(Input)
            if node.key in hints.inputs and node.key not in hints.whole
            for wanted, sbp in zip(hints.inputs[node.key], values[node.value.name].sbp, strict=True)
        )


def _fits(graph: LogicalGraph, hints: Hints, placement: Placement, assignment: Assignment) -> bool:
    """True where the rules allow the layouts, and every rank has a part of each split tensor."""
    grid, thin = placement.shape, splits_with_empty_shards(graph, hints, placement)
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
            made = node.output_names
            layouts = (*assignment.operands[number], *map(assignment.values.get, made))
            names = (*node.operands, *made) if thin else ()
            ports = tuple([thin.get(name, _NONE) for name in names])
            yield node.first, layouts, len(made), ports if any(ports) else ()


def _legal(
    call: OpCall,
    layouts: tuple[Layout | None, ...],
    results: int,
    thin: tuple[Thin, ...],
    grid: tuple[int, ...],
) -> bool:
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
    by_axis = ([one.sbp[axis] if one else Broadcast() for one in layouts] for axis in range(axes))
    split = len(layouts) - results
    return tuple([Signature(tuple(sbps[:split]), tuple(sbps[split:])) for sbps in by_axis])
