"""Reorder sums so that the results of matrix products are added first.

Autograd adds up gradients in the order in which they come: to the gradient of a residual that of one layer, then that
of the next. If layers are split by their inputs or outputs, products are Partial and the residual is not, so each
product would be reduced separately. If the products are added first, one reduction is enough.

Before: a graph as captured. After: an equal one up to the order of floating-point sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.context import Context
from weft.compiler.graph.rewriting import only_result
from weft.ir.logical import Call, LogicalGraph, Node, Ref
from weft.ops.rule import aten

ADD = "aten.add.Tensor"
_PRODUCTS = frozenset(aten("mm addmm bmm matmul linear"))
_MOVES = frozenset(aten("view _unsafe_view reshape transpose.int t permute clone _to_copy"))


def products_first(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """The graph with products added up before they are added to anything else."""
    sums = _Sums(graph)
    for node in graph.of_kind(Call):
        first = node.args[0] if node.args else None
        moved = node.op in _MOVES and isinstance(first, Ref) and first.name in sums.products
        if node.op in _PRODUCTS or moved:
            sums.products.update(value.name for value in node.makes)
        elif _is_sum(graph, node):
            sums.add(node)
    if not sums.written:
        return graph
    nodes = (each for node in graph.nodes for each in sums.written.get(_name(node), [node]))
    return replace(graph, nodes=tuple(nodes))


def _is_sum(graph: LogicalGraph, node: Node) -> bool:
    if not isinstance(node, Call) or node.op != ADD or node.kwargs:
        return False
    names = {arg.name for arg in node.args if isinstance(arg, Ref)}
    values = [graph.values[name] for name in (*names, _name(node))]
    return len(names) == 2 and len({(value.shape, value.dtype) for value in values}) == 1


@final
@dataclass
class _Sums:
    """Sums so far, in the order of the graph, added up by kind.

    Attributes:
        kinds: for each sum that is a term of another, the sums of its other terms and of its products.
        calls: for each of these that has both, the calls in its place.
        below: for each of these, those among its own terms.
        written: for each node that is to be replaced, what is in its place.
    """

    graph: LogicalGraph
    products: set[str] = field(default_factory=set)
    kinds: dict[str, tuple[Ref | None, Ref | None]] = field(default_factory=dict)
    calls: dict[str, list[Node]] = field(default_factory=dict)
    below: dict[str, list[str]] = field(default_factory=dict)
    written: dict[str, list[Node]] = field(default_factory=dict)

    def add(self, call: Call) -> None:
        """Add up one more sum; one that is not a term of another is written, if a term of it has both kinds."""
        name, terms = _name(call), [arg.name for arg in call.args if isinstance(arg, Ref)]
        (others, products), calls = self._both(call, terms)
        mixed = [term for term in terms if term in self.calls]
        users = self.graph.users[_name(call)]
        if len(users) == 1 and _is_sum(self.graph, users[0]):
            if others and products:
                self.kinds[name], self.calls[name] = (others, products), calls
                self.below[name] = mixed
            else:  # of one kind: as it was
                one = self.graph.values[name].ref
                self.kinds[name] = (others and one, products and one)
        elif others and products and mixed:
            self.written[name] = [*calls, call.changed(args=(others, products))]
            while mixed:
                term = mixed.pop()
                self.written[term] = self.calls[term]
                mixed += self.below[term]

    def _both(
        self, call: Call, terms: list[str]
    ) -> tuple[tuple[Ref | None, Ref | None], list[Node]]:
        """The sums of the terms of two terms, by kind, and the calls that add them up."""
        calls: list[Node] = []
        found: list[Ref | None] = []
        refs = {term: self.graph.values[term].ref for term in terms}
        alone = {
            term: (None, ref) if term in self.products else (ref, None)
            for term, ref in refs.items()
        }
        pairs = zip(*(self.kinds.get(term, alone[term]) for term in terms), strict=True)
        for kind, (a, b) in zip(("others", "products"), pairs, strict=True):
            made = a or b
            if a and b:
                value = only_result(call)
                value = replace(value, name=f"{value.name}.{kind}")
                calls.append(call.changed(args=(a, b), outputs=(value,)))
                made = value.ref
            found.append(made)
        return (found[0], found[1]), calls


def _name(node: Node) -> str:
    made = node.outputs if isinstance(node, Call) and len(node.outputs) == 1 else (None,)
    return made[0].name if made[0] else ""
