"""Fused attention and its backward ops: batch, heads and queries may be split; every rank sees all keys.

Queries that are split under whole keys are a split sequence (context parallelism as in "The Llama 3
Herd of Models", section 3.3.2): gradients of keys and values add up over the ranks. A causal mask
counts positions from the first query, so that a rank with later queries runs `weft.attention_rows`,
which is told the position of its first one.

`weft.attention_rows(query, key, value, offset, scale=)` is `(output, logsumexp)` of the queries at
positions offset, offset + 1, …, each under a causal mask over `key` and `value`, whose positions count
from 0. `weft.attention_rows_backward(grad, query, key, value, output, logsumexp, offset, scale=)` makes
the gradients of query, key and value that come from these queries.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from weft.layout import Split
from weft.ops.arguments import argument, slot_specs, slots, tensor_argument
from weft.ops.call import OpCall
from weft.ops.factors import WHOLE, Dims, Factors, whole_factors
from weft.ops.rule import Adapt, Cut, aten, rule
from weft.ops.rules.common import FIRST, shape_of

ROWS, ROWS_BACKWARD = "weft.attention_rows", "weft.attention_rows_backward"


def _by_heads(call: OpCall, query: int) -> Factors:
    """Batch and heads of every tensor of rank 3 or 4; heads as in `_by_queries`."""
    shape = call.operands[query].shape

    def dims(tensor: tuple[int, ...]) -> Dims:
        if len(tensor) not in (3, 4) or tensor[0] not in (1, shape[0]):
            return (WHOLE,) * len(tensor)
        return ("b", "h", *(WHOLE,) * (len(tensor) - 2))

    return Factors(
        tuple(dims(spec.shape) for spec in slot_specs(call)),
        tuple(dims(shape_of(spec)) for spec in call.results),
        contracted=frozenset("h" if query else ""),
    )


def _fused(query: int, dropout: int) -> Callable[[OpCall], Factors]:
    """Factors of a fused attention op; with dropout in the kernel, its masks depend on the shapes: all whole."""

    def factors(call: OpCall) -> Factors:
        if argument(call, dropout, "dropout_p", 0.0):
            return whole_factors(call)
        return _by_heads(call, query)

    return factors


def _by_queries(
    first: int, results: tuple[str, ...], contracted: str
) -> Callable[[OpCall], Factors]:
    """Factors of the CPU kernel and of causal rows; `first` counts the tensors before the query.

    Where there are fewer heads of keys than of queries, groups of heads go together: the ranks must
    divide both numbers. A single head of keys serves every head of queries.
    """

    def factors(call: OpCall) -> Factors:
        # Masks of dropout in a kernel depend on the shapes, so that all stays whole.
        if not _is_rows(call) and bool(argument(call, 6 if first else 3, "dropout_p", 0.0)):
            return whole_factors(call)
        leading = ("b h q d",) * first + ("b h q d", "b h k d", "b h k d")
        leading += ("b h q d", "b h q") if first else ()
        operands = [tuple(term.split()) for term in leading]
        operands += [
            ("b", "h", "q", "k")[4 - len(spec.shape) :] for spec in slot_specs(call)[len(leading) :]
        ]
        return Factors(
            tuple(operands),
            tuple(tuple(term.split()) for term in results),
            contracted=frozenset(contracted.split()),
            whole=_whole(call, first),
        )

    return factors


def _whole(call: OpCall, first: int) -> frozenset[str]:
    """Depth; keys, but for the gradients of an attention that is not causal; queries under a second mask."""
    if not _causal(call, first):
        return frozenset("d" if first else "dk")
    masked = len(slot_specs(call)) > (6 if first else 3)
    return frozenset("dkq" if masked else "dk")


def _causal(call: OpCall, first: int) -> bool:
    return _is_rows(call) or bool(argument(call, 7 if first else 4, "is_causal", False))


def _is_rows(call: OpCall) -> bool:
    return call.op in (ROWS, ROWS_BACKWARD)


def _from_first_query(first: int) -> Adapt:
    """Under a causal mask, queries that are split run as rows that begin at a position of their own."""
    query, op, arity = first, ROWS_BACKWARD if first else ROWS, 6 if first else 3

    def adapt(local: OpCall, cut: Cut) -> OpCall:
        operand = slots(cut.whole)[query]
        if not _causal(local, first) or cut.signature.operands[operand] != Split(2):
            return local
        before = argument(local, arity) if _is_rows(local) else 0
        offset = before + cut.operand_range(operand, 2)[0]
        kwargs = tuple((name, value) for name, value in local.kwargs if name == "scale")
        return OpCall(op, (*local.args[:arity], offset), kwargs, local.operands, local.results)

    return adapt


def _attention_flops(query: int, products: int) -> Callable[[OpCall], int]:
    """`products` matrix products of (queries, keys, depth) for each batch and head, as if nothing were masked."""

    def flops(call: OpCall) -> int:
        q, k = tensor_argument(call, query), tensor_argument(call, query + 1)
        assert q is not None
        assert k is not None
        return 2 * products * prod(q.shape) * k.shape[-2]

    return flops


rule(
    (*aten("_scaled_dot_product_flash_attention_for_cpu"), ROWS),
    _by_queries(0, ("b h q d", "b h q"), ""),
    flops=_attention_flops(0, 2),
    adapt=_from_first_query(0),
)
rule(
    (*aten("_scaled_dot_product_flash_attention_for_cpu_backward"), ROWS_BACKWARD),
    _by_queries(1, ("b h q d", "b h k d", "b h k d"), "h q k"),
    linear=FIRST,
    flops=_attention_flops(1, 5),
    adapt=_from_first_query(1),
)
for _name, _forward, _backward in (
    ("flash_attention", 3, 10),
    ("efficient_attention", 5, 9),
    ("cudnn_attention", 5, 13),
    ("fused_attention_overrideable", 4, 12),
):
    rule(
        aten(f"_scaled_dot_product_{_name}"),
        _fused(0, _forward),
        flops=_attention_flops(0, 2),
    )
    rule(
        aten(f"_scaled_dot_product_{_name}_backward"),
        _fused(1, _backward),
        linear=FIRST,
        flops=_attention_flops(1, 5),
    )
