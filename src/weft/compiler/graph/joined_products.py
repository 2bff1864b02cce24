"""Sums of small products as one product: the gradient of a weight that a loop uses at every step.

Before: `x1ᵀ y1 + x2ᵀ y2 + …`, with `x` of (k, m) and `y` of (k, n), as the backward of a recurrent
cell leaves it. After: `Xᵀ Y`, with `X` the `x` stacked to (k, steps, m) and viewed as (k·steps, m),
and `Y` likewise. Rows stay outermost, so that a batch that is split, over ranks or in time, stays
split. Each `xᵀ y` and each sum moves m·n numbers, each stacking k·(m+n): joined where that is less.
Sums of the rows of the same `x`, gradients of biases, are joined with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.context import Context
from weft.compiler.graph.product_sums import (
    TRANSPOSE,
    Names,
    ProductSum,
    Term,
    names_of_x,
    product_sums,
)
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value, node_outputs

MM, STACK = "aten.mm.default", "aten.stack.default"
VIEW, SUM = "aten.view.default", "aten.sum.dim_IntList"


def join_products(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph with sums of small products joined, unless torch's own kernels are asked for."""
    sums = product_sums(graph) if context.options.own_kernels else {}
    if not sums:
        return graph
    gone = {id(add) for each in sums.values() for add in each.adds}
    terms = [term for each in sums.values() for group in each.joined for term in group]
    gone |= {id(call) for term in terms for call in term.calls}
    writer = _StackWriter(graph)
    for node in graph.nodes:
        if id(node) in sums:
            writer.write(node, sums[id(node)])
        elif id(node) not in gone:
            writer.nodes.append(node)
    return replace(graph, nodes=tuple(writer.nodes))


@final
@dataclass(frozen=True)
class _StackWriter:
    """Writes the nodes of the new graph."""

    graph: LogicalGraph
    nodes: list[Node] = field(default_factory=list)
    # Values stacked and viewed as matrices so far.
    stacks: dict[Names, Value] = field(default_factory=dict)

    def write(self, root: Node, found: ProductSum) -> None:
        """Write the nodes that the add `root` stands for."""
        assert isinstance(root, Call)  # sums are calls
        (total,) = node_outputs(root)
        parts = list(found.others)
        for number, group in enumerate(found.joined):
            last = number + 1 == len(found.joined) and not parts
            made = total if last else replace(total, name=f"{total.name}.part{number}")
            self._join(root, group, made)
            parts.append(made.name)
        while len(parts) > 1:
            first, second, *rest = parts
            made = replace(total, name=f"{total.name}.sum{len(rest)}") if rest else total
            self.nodes.append(replace(root, args=(Ref(first), Ref(second)), outputs=(made,)))
            parts = [made.name, *rest]

    def _join(self, root: Call, group: Sequence[Term], made: Value) -> None:
        x = self._stacked(root, names_of_x(group))
        if group[0].y is None:
            (columns,) = made.shape
            row = Value(f"{made.name}.row", (1, columns), made.dtype)
            self._call(root, SUM, (Ref(x.name), (0,), True), row)
            self._call(root, VIEW, (Ref(row.name), (columns,)), made)
            return
        y = self._stacked(root, tuple(term.y for term in group if term.y is not None))
        flipped = Value(f"{made.name}.t", x.shape[::-1], x.dtype)
        self._call(root, TRANSPOSE, (Ref(x.name),), flipped)
        self._call(root, MM, (Ref(flipped.name), Ref(y.name)), made)

    def _stacked(self, root: Call, names: Names) -> Value:
        """The matrix of all rows of some matrices; made where the first sum reads it."""
        if names not in self.stacks:
            first = self.graph.values[names[0]]
            rows, columns = first.shape
            number, steps = len(self.stacks), len(names)
            stack = Value(f"{names[0]}.steps{number}", (rows, steps, columns), first.dtype)
            matrix = Value(f"{stack.name}.rows", (rows * steps, columns), first.dtype)
            self._call(root, STACK, (tuple(map(Ref, names)), 1), stack)
            self._call(root, VIEW, (Ref(stack.name), matrix.shape), matrix)
            self.stacks[names] = matrix
        return self.stacks[names]

    def _call(self, root: Call, op: str, args: tuple[Arg, ...], made: Value) -> None:
        self.nodes.append(replace(root, op=op, args=args, outputs=(made,)))
