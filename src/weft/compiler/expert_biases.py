"""Biases of experts as products, so that they are added where the rows of their experts are.

`b[ids]`, for a table b [e, n], gives each row what its expert adds. Read outside of the buffers, it would be sent
there, as wide as what is computed. As `weft.expert_mm(ones[s, 1], b[e, 1, n], ids)` it is one more product of the
mixture, and the sum of gradients by experts is its `weft.expert_gradient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.compiler.needed import needed
from weft.compiler.sorted_rows import ALIKE, INDEX, PUT
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value
from weft.ops.call import Token
from weft.ops.rules.experts import EXPERT_GRADIENT, EXPERT_MM

ONES = "aten.new_ones.default"


def biases(graph: LogicalGraph, ids: str, experts: int) -> tuple[Call, ...]:
    """The calls that read a table [experts, n] at the experts of rows, and those that add up its gradient."""
    return tuple(
        node
        for node in graph.users[ids]
        if isinstance(node, Call) and (_reads(graph, node, experts) or _adds(graph, node, experts))
    )


def table_of(bias: Call) -> str | None:
    """The table that such a call reads."""
    return _name(bias.args[0]) if bias.op == INDEX else None


def _reads(graph: LogicalGraph, node: Call, experts: int) -> bool:
    match node:
        case Call(op=op, args=(Ref(name=table), (Ref(),))) if op == INDEX:
            shape = graph.values[table].shape
            return len(shape) == 2 and shape[0] == experts
    return False


def _adds(graph: LogicalGraph, node: Call, experts: int) -> bool:
    match node:
        case Call(op=op, args=(Ref(name=x), (Ref(),), Ref(), True)) if op == PUT:
            maker, shape = graph.producers[x], graph.values[x].shape
            zeros = isinstance(maker, Call) and maker.op in ALIKE and "zeros" in maker.op
            return zeros and len(shape) == 2 and shape[0] == experts
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
    (made,) = bias.outputs
    assert made is not None  # of an op with one result

    def call(op: str, args: tuple[Any, ...], name: str, shape: tuple[int, ...]) -> Call:
        value = Value(f"{made.name}.{name}", shape, made.dtype)
        return replace(bias, op=op, args=args, kwargs=(), outputs=(value,))

    ids = bias.args[1]
    assert isinstance(ids, tuple)
    (chosen,) = ids
    rows, experts = graph.values[_name(chosen)].shape[0], graph.values[_name(bias.args[0])].shape[0]
    ones = call(ONES, (chosen, (rows, 1)), "ones", (rows, 1))
    ones = replace(ones, kwargs=(("dtype", Token("dtype", made.dtype)),))
    one, apart = Ref(f"{made.name}.ones"), Ref(f"{made.name}.apart")
    wide = (experts, 1, made.shape[1])
    if bias.op == INDEX:
        table = call("aten.unsqueeze.default", (bias.args[0], 1), "apart", wide)
        product = replace(bias, op=EXPERT_MM, args=(one, apart, chosen, 0))
        return [ones, table, product], product
    product = call(EXPERT_GRADIENT, (one, bias.args[2], chosen, experts, 0), "apart", wide)
    flat = replace(bias, op="aten.squeeze.dim", args=(apart, 1), kwargs=())
    return [ones, product, flat], product


def _name(arg: Arg) -> str:
    assert isinstance(arg, Ref)
    return arg.name
