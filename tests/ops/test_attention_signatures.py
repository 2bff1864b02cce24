"""What attention ops allow that run on other devices than this one: by shapes alone."""

from __future__ import annotations

import pytest

from weft.ops import OpCall, Operand, TensorSpec, signatures

NAME = "aten._scaled_dot_product_flash_attention"


def _forward(key_heads: int, causal: bool = True) -> OpCall:
    query, key = ((2, heads, 16, 8) for heads in (8, key_heads))
    operands = tuple(TensorSpec(shape, "bfloat16") for shape in (query, key, key))
    made = (TensorSpec(query, "bfloat16"), TensorSpec(query[:3], "float32"), None, None)
    made += (None, None, TensorSpec((2,), "uint64"), TensorSpec((), "uint64"), None)
    args = (*map(Operand, range(3)), 0.0, causal)
    return OpCall(f"{NAME}.default", args, (), operands, made)


def _backward(key_heads: int) -> OpCall:
    forward = _forward(key_heads)
    out, sums = forward.results[:2]
    assert out is not None
    assert sums is not None
    operands = (out, *forward.operands, out, sums, *(TensorSpec((2,), "uint64"),) * 2)
    args = (*map(Operand, range(6)), None, None, 16, 16, 0.0, True, Operand(6), Operand(7))
    return OpCall(f"{NAME}_backward.default", args, (), operands, forward.operands)


def _heads(call: OpCall, parts: int) -> list[str]:
    """The signatures under which queries are split by heads."""
    query = 1 if "backward" in call.op else 0
    found = signatures(call, parts)
    return [str(one) for one in found if str(one.operands[query]) == "S(1)"]


@pytest.mark.parametrize("key_heads", [2, 8])
def test_groups_of_heads_go_together(key_heads: int) -> None:
    (forward,), (backward,) = _heads(_forward(key_heads), 2), _heads(_backward(key_heads), 2)
    assert forward.startswith("S(1), S(1), S(1) -> S(1), S(1)")
    assert backward.endswith("-> S(1), S(1), S(1)")


def test_ranks_must_divide_the_heads_of_keys() -> None:
    assert _heads(_forward(2), 4) == _heads(_backward(2), 4) == []


def test_gradients_of_a_single_head_of_keys_add_up() -> None:
    """Every rank's queries see it."""
    (forward,), (backward,) = _heads(_forward(1), 4), _heads(_backward(1), 4)
    assert forward.startswith("S(1), B, B -> S(1), S(1)")
    assert backward.endswith("-> S(1), P(sum), P(sum)")
