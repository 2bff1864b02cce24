"""Graphs that are alike: the same nodes read the same values, and only sizes differ.

A slice of all rows is none: where a table of positions is as long as the batch, one graph has no slice and the
other has one. So a slice that only one of them has stands for what it is taken from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

from weft.compiler.hints import is_hint
from weft.ir.logical import Call, Input, LogicalGraph, Node, Output, Update, Value
from weft.ir.nodes import node_outputs, node_uses

# A tensor may be so many times as large or as small.
NEAR = 2
_SLICE = "aten.slice.Tensor"


@dataclass
class Match:
    """How the nodes of a graph correspond to those of one that is alike.

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
        made, makes = _made(one), _made(other)
        if not self._same(one, other) or [*map(bool, made)] != [*map(bool, makes)]:
            return False
        self.numbers.append(number)
        self.names.update((b, a) for a, b in zip(made, makes, strict=True) if b)
        return True

    def add_slice(self, node: Node) -> None:
        """A slice that the other graph has not."""
        (read,), (made,) = node_uses(node), node_outputs(node)
        self.names[made.name] = self.names[read]
        self.sliced.add(self.names[read])
        self.numbers.append(None)

    def skip_slice(self, node: Node) -> None:
        """A slice that only the other graph has."""
        (read,), (made,) = node_uses(node), node_outputs(node)
        self._of[made.name] = self._of.get(read, read)
        self.sliced |= {read, made.name}

    def _same(self, one: Node, other: Node) -> bool:
        """Whether two nodes do the same with the same values, whatever sizes and numbers they have."""
        match one, other:
            case Call(), Call():
                same = one.op == other.op and one.phase == other.phase
                reads = one.operands, other.operands
                same = same and (not is_hint(one) or one.args[1:] == other.args[1:])
            case Input(), Input():
                return (one.role, one.key, one.shares) == (other.role, other.key, other.shares)
            case Update(), Update():
                same = one.rule == other.rule and one.group == other.group
                same = (
                    same
                    and one.elementwise == other.elementwise
                    and bool(one.skip) == bool(other.skip)
                )
                reads = one.uses, other.uses
            case Output(), Output():
                same, reads = one.key == other.key, (one.uses, other.uses)
            case _:
                return False
        return same and self._reads(*reads)

    def _reads(self, before: tuple[str, ...], now: tuple[str, ...]) -> bool:
        of = self._of
        return [of.get(name, name) for name in before] == [
            of.get(self.names[name], self.names[name]) for name in now
        ]


def match(before: LogicalGraph, graph: LogicalGraph) -> Match | None:
    """How a graph corresponds to another one; None where they are not alike, or their sizes are not close."""
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
    near = number == len(every) and _near(_pairs(found, before, graph))
    return found if near else None


def _is_slice(node: Node) -> bool:
    return isinstance(node, Call) and node.op == _SLICE


def _made(node: Node) -> list[str]:
    """The values that a node makes; empty where a call makes none."""
    if isinstance(node, Call):
        return [value.name if value else "" for value in node.outputs]
    return [value.name for value in node_outputs(node)]


def _pairs(
    found: Match, before: LogicalGraph, graph: LogicalGraph
) -> Iterator[tuple[Value, Value]]:
    for number, node in zip(found.numbers, graph.nodes, strict=True):
        if number is not None:
            yield from zip(node_outputs(before.nodes[number]), node_outputs(node), strict=True)


def _near(pairs: Iterable[tuple[Value, Value]]) -> bool:
    """Whether dtypes are the same, and so are numbers of dimensions, and sizes are close."""
    for dtype, shape, other, now in {(a.dtype, a.shape, b.dtype, b.shape) for a, b in pairs}:
        least, most = sorted((prod(shape), prod(now)))
        if dtype != other or len(shape) != len(now) or most > NEAR * least:
            return False
    return True
