"""Fused attention and its backward ops: batch and heads may be split, and the query where it is not causal."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from weft.ops.arguments import argument, slot_specs, tensor_argument
from weft.ops.call import OpCall
from weft.ops.factors import WHOLE, Dims, Factors, whole_factors
from weft.ops.rule import aten, rule
from weft.ops.rules.common import FIRST, shape_of


def _by_heads(call: OpCall, query: int) -> Factors:
    """Batch and heads of every tensor of rank 3 or 4; grouped heads (fewer of keys than of queries) stay whole."""
    shape = call.operands[query].shape
    heads = {spec.shape[1] for spec in slot_specs(call) if len(spec.shape) == 4} - {1}

    def dims(tensor: tuple[int, ...]) -> Dims:
        if len(tensor) not in (3, 4) or tensor[0] not in (1, shape[0]):
            return (WHOLE,) * len(tensor)
        return ("b", "h" if len(heads) <= 1 else WHOLE, *(WHOLE,) * (len(tensor) - 2))

    return Factors(
        tuple(dims(spec.shape) for spec in slot_specs(call)),
        tuple(dims(shape_of(spec)) for spec in call.results),
    )


def _fused(query: int, dropout: int) -> Callable[[OpCall], Factors]:
    """Factors of a fused attention op; with dropout in the kernel, its masks depend on the shapes: all whole."""

    def factors(call: OpCall) -> Factors:
        if argument(call, dropout, "dropout_p", 0.0):
            return whole_factors(call)
        return _by_heads(call, query)

    return factors


def _mask_dims(shape: tuple[int, ...]) -> Dims:
    return ("b", "h", "q", "k")[4 - len(shape) :]


def _cpu(first: int, results: tuple[str, ...], contracted: str) -> Callable[[OpCall], Factors]:
    """Factors of the CPU kernel; `first` counts the tensors before the query.

    A causal mask counts positions from the first query, so that queries and keys stay whole under
    it.
    """

    def factors(call: OpCall) -> Factors:
        causal = argument(call, 4 if first == 0 else 7, "is_causal", False)
        if argument(call, 3 if first == 0 else 6, "dropout_p", 0.0):
            return whole_factors(call)
        grouped = _heads(call, first) != _heads(call, first + 1)
        leading = ("b h q d",) * first + ("b h q d", "b h k d", "b h k d")
        leading += ("b h q d", "b h q") if first else ()
        operands = [tuple(term.split()) for term in leading]
        operands += [_mask_dims(spec.shape) for spec in slot_specs(call)[len(leading) :]]
        return Factors(
            tuple(operands),
            tuple(tuple(term.split()) for term in results),
            contracted=frozenset(contracted.split()),
            whole=frozenset("d" + ("" if contracted else "k"))
            | frozenset("qk" if causal else "")
            | frozenset("h" if grouped else ""),
        )

    return factors


def _heads(call: OpCall, slot: int) -> int:
    return slot_specs(call)[slot].shape[1]


def _attention_flops(query: int, products: int) -> Callable[[OpCall], int]:
    """`products` matrix products of (queries, keys, depth) for each batch and head, as if nothing were masked."""

    def flops(call: OpCall) -> int:
        q, k = tensor_argument(call, query), tensor_argument(call, query + 1)
        assert q is not None
        assert k is not None
        return 2 * products * prod(q.shape) * k.shape[-2]

    return flops


rule(
    aten("_scaled_dot_product_flash_attention_for_cpu"),
    _cpu(0, ("b h q d", "b h q"), ""),
    flops=_attention_flops(0, 2),
)
rule(
    aten("_scaled_dot_product_flash_attention_for_cpu_backward"),
    _cpu(1, ("b h q d", "b h k d", "b h k d"), "q k"),
    linear=FIRST,
    flops=_attention_flops(1, 5),
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
