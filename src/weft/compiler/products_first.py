"""Sums in which what products make is added up first.

Autograd adds up gradients in the order in which they come: to the gradient of a residual that of one
layer, then that of the next. Where layers are split by their inputs or outputs, products are parts of
sums and the residual is none, so each would be reduced alone before it meets the residual. Added to
one another first, they are reduced once.

Before: a graph as captured. After: an equal one up to the order of floating-point sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from weft.ir.logical import Call, LogicalGraph, Node, Ref
from weft.ops.rule import aten

ADD = "aten.add.Tensor"
_PRODUCTS = frozenset(aten("mm addmm bmm matmul linear"))
_MOVES = frozenset(aten("view _unsafe_view reshape transpose.int t permute clone _to_copy"))


def products_first(graph: LogicalGraph) -> LogicalGraph:
    """The graph with products added up before they are added to anything else."""
    products = _products(graph)
    written: dict[str, list[Node]] = {}
    for node in graph.of_kind(Call):
        if _is_sum(graph, node) and not _is_term(graph, node):
            terms = _Terms(graph, products)
            terms.add_up(node)
            written |= terms.written if terms.mixed else {}
    if not written:
        return graph
    nodes = (each for node in graph.nodes for each in written.get(_name(node), [node]))
    return replace(graph, nodes=tuple(nodes))


def _products(graph: LogicalGraph) -> set[str]:
    """Values that are products, moved or converted."""
    found: set[str] = set()
    for node in graph.of_kind(Call):
        first = node.args[0] if node.args else None
        moved = node.op in _MOVES and isinstance(first, Ref) and first.name in found
        if node.op in _PRODUCTS or moved:
            found.update(value.name for value in node.outputs if value)
    return found


def _is_sum(graph: LogicalGraph, node: Node) -> bool:
    """Whether a node is a plain sum of two tensors that are alike."""
    if not isinstance(node, Call) or node.op != ADD or node.kwargs:
        return False
    names = {arg.name for arg in node.args if isinstance(arg, Ref)}
    values = [graph.values[name] for name in (*names, _name(node))]
    return len(names) == 2 and len({(value.shape, value.dtype) for value in values}) == 1


def _is_term(graph: LogicalGraph, node: Node) -> bool:
    """Whether a sum is only a term of another one."""
    users = graph.users[_name(node)]
    return len(users) == 1 and _is_sum(graph, users[0])


@dataclass
class _Terms:
    """A sum that is no term of another, added up by kind.

    Attributes:
        written: for each sum in it, the calls in its place.
        mixed: whether a term of the sum is one of both kinds.
    """

    graph: LogicalGraph
    products: set[str]
    written: dict[str, list[Node]] = field(default_factory=dict)
    mixed: bool = False

    def add_up(self, root: Call) -> None:
        """Write the whole sum."""
        calls: list[Node] = []
        kinds = self._both(root, calls)
        if None in kinds:
            return
        others, products = kinds
        self.written[_name(root)] = [*calls, replace(root, args=(others, products))]

    def _kinds(self, name: str) -> tuple[Ref | None, Ref | None]:
        """The sums of the other terms and of the products in a term."""
        maker = self.graph.producers[name]
        if not _is_sum(self.graph, maker) or not _is_term(self.graph, maker):
            return (None, Ref(name)) if name in self.products else (Ref(name), None)
        assert isinstance(maker, Call)
        calls: list[Node] = []
        kinds = self._both(maker, calls)
        if None in kinds:  # of one kind: as it was
            return tuple(each and Ref(name) for each in kinds)  # type: ignore[return-value]
        self.mixed = True
        self.written[name] = calls
        return kinds

    def _both(self, call: Call, calls: list[Node]) -> tuple[Ref | None, Ref | None]:
        """The sums of the terms of two terms, by kind, with the calls that add them up."""
        one, two = (self._kinds(arg.name) for arg in call.args if isinstance(arg, Ref))
        found: list[Ref | None] = []
        for kind, a, b in zip(("others", "products"), one, two, strict=True):
            made = a or b
            if a and b:
                (value,) = call.outputs
                assert value is not None
                value = replace(value, name=f"{value.name}.{kind}")
                calls.append(replace(call, args=(a, b), outputs=(value,)))
                made = Ref(value.name)
            found.append(made)
        return found[0], found[1]


def _name(node: Node) -> str:
    """The name of a call's one result; empty for what is no such call."""
    made = node.outputs if isinstance(node, Call) and len(node.outputs) == 1 else (None,)
    return made[0].name if made[0] else ""
