"""Biases of experts as products, so that they are added where the rows of their experts are.

`b[ids]`, for a table b [e, n], gives each row what its expert adds. Read outside of the buffers, it would be sent
there, as wide as what is computed. As `weft.expert_mm(ones[s, 1], b[e, 1, n], ids)` it is one more product of the
mixture, and the sum of gradients by experts is its `weft.expert_gradient`, which adds up over micro-batches too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from weft.compiler.experts.sorted_rows import ALIKE, INDEX, PUT
from weft.compiler.graph.rewriting import needed, only_result, ref_name
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value
from weft.ops.call import Token
from weft.ops.rules.own.experts import EXPERT_GRADIENT, EXPERT_MM

ONES = "aten.ones_like.default"


def bias_gradients(graph: LogicalGraph) -> LogicalGraph:
    """The graph with sums of gradients by experts as products of the mixtures whose experts they read."""
    ids = {node.args[2] for node in graph.of_kind(Call) if node.op in (EXPERT_MM, EXPERT_GRADIENT)}
    sums = [node for node in graph.of_kind(Call) if _adds(graph, node, ids)]
    return as_products(graph, sums)[0] if sums else graph


def biases(graph: LogicalGraph, ids: str, experts: int) -> tuple[Call, ...]:
    """The calls that read a table [experts, n] at the experts of rows."""
    users = graph.users[ids]
    return tuple(node for node in users if isinstance(node, Call) and _reads(graph, node, experts))


def table_of(bias: Call) -> str:
    """The table that such a call reads."""
    return ref_name(bias.args[0])


def _reads(graph: LogicalGraph, node: Call, experts: int) -> bool:
    match node:
        case Call(op=op, args=(Ref(name=table), (Ref(),))) if op == INDEX:
            shape = graph.values[table].shape
            return len(shape) == 2 and shape[0] == experts
    return False


def _adds(graph: LogicalGraph, node: Call, ids: Collection[Arg]) -> bool:
    """True where rows are added to zeros [experts, n] at the experts of `ids`."""
    match node:
        case Call(op=op, args=(Ref(name=x), (Ref() as at,), Ref(), True)) if (
            op == PUT and at in ids
        ):
            maker = graph.producers[x]
            zeros = isinstance(maker, Call) and maker.op in ALIKE and "zeros" in maker.op
            return zeros and len(graph.values[x].shape) == 2
    return False


def as_products(
    graph: LogicalGraph, found: Sequence[Call]
) -> tuple[LogicalGraph, tuple[Call, ...]]:
    """The graph with such calls as products, and these."""
    chosen = {id(call) for call in found}
    nodes: list[Node] = []
    products: list[Call] = []
    for node in graph.nodes:
        if not isinstance(node, Call) or id(node) not in chosen:
            nodes.append(node)
            continue
        calls, product = _product(graph, node)
        nodes += calls
        products.append(product)
    return needed(replace(graph, nodes=tuple(nodes))), tuple(products)


def _product(graph: LogicalGraph, bias: Call) -> tuple[list[Call], Call]:
    """The calls in place of one, and the product among them."""
    made = only_result(bias)

    def call(
        op: str, args: tuple[Any, ...], name: str, shape: tuple[int, ...], dtype: str = made.dtype
    ) -> Call:
        value = Value(f"{made.name}.{name}", shape, dtype)
        return bias.changed(op=op, args=args, kwargs=(), outputs=(value,))

    ids = bias.args[1]
    assert isinstance(ids, tuple)
    (chosen,) = ids
    numbers, table = graph.values[ref_name(chosen)], graph.values[ref_name(bias.args[0])]
    rows, experts = numbers.shape[0], table.shape[0]
    each = call("aten.unsqueeze.default", (chosen, 1), "each", (rows, 1), numbers.dtype)
    ones = call(ONES, (only_result(each).ref,), "ones", (rows, 1))
    ones = ones.changed(kwargs=(("dtype", Token("dtype", made.dtype)),))
    one = only_result(ones).ref
    wide = (experts, 1, made.shape[1])
    if bias.op == INDEX:
        cubic = call("aten.unsqueeze.default", (bias.args[0], 1), "apart", wide)
        product = bias.changed(op=EXPERT_MM, args=(one, only_result(cubic).ref, chosen, 0))
        return [each, ones, cubic, product], product
    product = call(EXPERT_GRADIENT, (one, bias.args[2], chosen, experts, 0), "apart", wide)
    flat = bias.changed(op="aten.squeeze.dim", args=(only_result(product).ref, 1), kwargs=())
    return [each, ones, product, flat], product
