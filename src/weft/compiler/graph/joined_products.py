"""Turn a sum of small matrix products into one product: the gradient of a weight that a loop uses at every step.

Before: `x1ᵀ y1 + x2ᵀ y2 + …`, with `x` of (k, m) and `y` of (k, n), as the backward of a recurrent
cell leaves it. After: `Xᵀ Y`, with `X` the `x` stacked to (k, steps, m) and viewed as (k·steps, m),
and `Y` likewise. Rows stay outermost, so that a batch that is split, over ranks or in time, stays
split. Each `xᵀ y` and each sum moves m·n numbers, each stacking k·(m+n): joined where that is less.
Sums of the rows of the same `x`, gradients of biases, are joined with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, final

from weft.compiler.context import Context
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value

ADD, TRANSPOSE = "aten.add.Tensor", "aten.t.default"

# The values that a joined value replaces, in the order of the graph: names of the `x`, or of the `y`.
Names: TypeAlias = tuple[str, ...]


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
@dataclass
class _StackWriter:
    graph: LogicalGraph
    nodes: list[Node] = field(default_factory=list)
    # Values stacked and viewed as matrices so far.
    stacks: dict[Names, Value] = field(default_factory=dict)

    def write(self, root: Node, found: ProductSum) -> None:
        """Write the nodes that the add `root` stands for."""
        assert isinstance(root, Call)  # sums are calls
        (total,) = root.makes
        parts = [self.graph.values[name] for name in found.others]
        for number, group in enumerate(found.joined):
            last = number + 1 == len(found.joined) and not parts
            made = total if last else replace(total, name=f"{total.name}.part{number}")
            self._join(root, group, made)
            parts.append(made)
        while len(parts) > 1:
            first, second, *rest = parts
            made = replace(total, name=f"{total.name}.sum{len(rest)}") if rest else total
            self.nodes.append(root.changed(args=(first.ref, second.ref), outputs=(made,)))
            parts = [made, *rest]

    def _join(self, root: Call, group: Sequence[Term], made: Value) -> None:
        x = self._stacked(root, names_of_x(group))
        if group[0].y is None:
            (columns,) = made.shape
            row = Value(f"{made.name}.row", (1, columns), made.dtype)
            self._call(root, SUM, (x.ref, (0,), True), row)
            self._call(root, VIEW, (row.ref, (columns,)), made)
            return
        y = self._stacked(root, tuple(term.y for term in group if term.y is not None))
        flipped = Value(f"{made.name}.t", x.shape[::-1], x.dtype)
        self._call(root, TRANSPOSE, (x.ref,), flipped)
        self._call(root, MM, (flipped.ref, y.ref), made)

    def _stacked(self, root: Call, names: Names) -> Value:
        if names not in self.stacks:
            first = self.graph.values[names[0]]
            rows, columns = first.shape
            number, steps = len(self.stacks), len(names)
            stack = Value(f"{names[0]}.steps{number}", (rows, steps, columns), first.dtype)
            matrix = Value(f"{stack.name}.rows", (rows * steps, columns), first.dtype)
            self._call(
                root, STACK, (tuple([self.graph.values[name].ref for name in names]), 1), stack
            )
            self._call(root, VIEW, (stack.ref, matrix.shape), matrix)
            self.stacks[names] = matrix
        return self.stacks[names]

    def _call(self, root: Call, op: str, args: tuple[Arg, ...], made: Value) -> None:
        self.nodes.append(root.changed(op=op, args=args, outputs=(made,)))


@final
@dataclass(frozen=True)
class Term:
    """`xᵀ y`, or without `y` the sum over the rows of `x`; `calls` make it and nothing else."""

    name: str
    calls: tuple[Call, ...]
    x: str
    y: str | None = None


@final
@dataclass(frozen=True)
class ProductSum:
    """A sum of terms that are joined, `others` that are not, and the `adds` below its last one."""

    joined: tuple[tuple[Term, ...], ...]
    others: Names
    adds: tuple[Call, ...]


def product_sums(graph: LogicalGraph) -> dict[int, ProductSum]:
    """The sums that are joined, by the id of the add that stands for the whole sum."""
    order = {name: position for position, name in enumerate(graph.values)}
    # Adds of two equal tensors whose result is no part of a larger sum.
    sums = [node for node in graph.of_kind(Call) if _is_sum(graph, node)]
    users = {id(add): graph.users[add.makes[0].name] for add in sums}
    roots = [x for x in sums if len(users[id(x)]) != 1 or not _is_sum(graph, users[id(x)][0])]
    trees = {id(root): (root, *_tree(graph, root)) for root in roots}
    terms = {key: [_term(graph, name) for name in names] for key, (_, names, _) in trees.items()}
    split = {key: tuple(x for x in own if x is not None) for key, own in terms.items()}
    # First the products; they say which sums over rows find their `x` stacked already.
    products = {key: _groups(terms, graph, order) for key, terms in split.items()}
    stacked = {names_of_x(group) for groups in products.values() for group in groups}
    found: dict[int, ProductSum] = {}
    for key, (_, names, adds) in trees.items():
        rows = tuple(sorted((t for t in split[key] if t.y is None), key=lambda t: order[t.x]))
        joined = (*products[key], *([rows] if names_of_x(rows) in stacked else []))
        taken = {term.name for group in joined for term in group}
        if joined:
            others = tuple(name for name in names if name not in taken)
            found[key] = ProductSum(joined, others, adds)
    return found


def names_of_x(group: Sequence[Term]) -> Names:
    """The `x` of terms."""
    return tuple(term.x for term in group)


def _groups(
    terms: Sequence[Term], graph: LogicalGraph, order: Mapping[str, int]
) -> tuple[tuple[Term, ...], ...]:
    """Products of equal shapes in one module that are cheaper as one, in the order of their `x`."""
    found: dict[object, list[Term]] = {}
    for term in terms:
        if term.y is not None:
            where = term.calls[-1].location
            place = (where.module, where.stage) if where else None
            shapes = (graph.values[term.x].shape, graph.values[term.y].shape)
            found.setdefault((place, shapes), []).append(term)
    groups = (tuple(sorted(group, key=lambda term: order[term.x])) for group in found.values())
    pay = []
    for group in groups:
        assert group[0].y is not None  # only products are asked
        (rows, m), (_, n) = graph.values[group[0].x].shape, graph.values[group[0].y].shape
        # Stacking moves fewer numbers than a product and a sum.
        if len(group) > 1 and 2 * rows * (m + n) < 3 * m * n:
            pay.append(group)
    return tuple(pay)


def _is_sum(graph: LogicalGraph, node: Node) -> bool:
    if not isinstance(node, Call) or node.op != ADD or node.kwargs:
        return False
    shape = node.makes[0].shape
    alike = all(isinstance(x, Ref) and graph.values[x.name].shape == shape for x in node.args)
    return alike and node.args[0] != node.args[1]


def _tree(graph: LogicalGraph, root: Call) -> tuple[Names, tuple[Call, ...]]:
    names: list[str] = []
    adds: list[Call] = []
    waiting = [root]
    while waiting:
        for name in (arg.name for arg in waiting.pop().args if isinstance(arg, Ref)):
            maker = graph.producers[name]
            if isinstance(maker, Call) and len(graph.users[name]) == 1 and _is_sum(graph, maker):
                adds.append(maker)
                waiting.append(maker)
            else:
                names.append(name)
    return tuple(names), tuple(adds)


def _term(graph: LogicalGraph, name: str) -> Term | None:
    match _only_maker(graph, name):
        case Call(op="aten.mm.default", args=(Ref(name=left), Ref(name=y))) as product:
            flip = graph.producers[left]
            if isinstance(flip, Call) and flip.op == TRANSPOSE and isinstance(flip.args[0], Ref):
                calls = (flip, product) if len(graph.users[left]) == 1 else (product,)
                return Term(name, calls, flip.args[0].name, y)
        case Call(op="aten.view.default", args=(Ref(name=inner), _)) as view:
            match _only_maker(graph, inner):
                case Call(op="aten.sum.dim_IntList", args=(Ref(name=x), (0,), True)) as rows:
                    flat = len(graph.values[name].shape) == 1 and len(graph.values[x].shape) == 2
                    return Term(name, (rows, view), x) if flat and not rows.kwargs else None
    return None


def _only_maker(graph: LogicalGraph, name: str) -> Node | None:
    return graph.producers[name] if len(graph.users[name]) == 1 else None
