"""Operations and bytes of calls, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from weft.ops import OpCall, Operand, TensorSpec, flops, traffic

A, B, C = Operand(0), Operand(1), Operand(2)
CONVOLUTION = ((1, 1), (1, 1), (1, 1), False, (0, 0))


def make(op: str, args: tuple[Any, ...], shapes: list[tuple[int, ...]], *results: Any) -> OpCall:
    specs = tuple(TensorSpec(shape, "float32") for shape in shapes)
    made = tuple(None if shape is None else TensorSpec(shape, "float32") for shape in results)
    return OpCall(f"aten.{op}", args, (), specs, made)


def test_a_tables_gradient_adds_rows() -> None:
    grad, indices = TensorSpec((5, 3), "float32"), TensorSpec((5,), "int64")
    result = TensorSpec((7, 3), "float32")
    args = (A, B, 7, -1, False)
    call = OpCall("aten.embedding_dense_backward.default", args, (), (grad, indices), (result,))
    assert flops(call) == 5 * 3


def test_comparing_few_numbers_is_no_dense_work() -> None:
    few, many = TensorSpec((8, 1), "int64"), TensorSpec((4096,), "int64")
    call = OpCall("aten.eq.Tensor", (A, B), (), (few, many), (TensorSpec((8, 4096), "bool"),))
    assert flops(call) == 4096


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (make("mm.default", (A, B), [(4, 6), (6, 8)], (4, 8)), 2 * 4 * 6 * 8),
        (make("bmm.default", (A, B), [(3, 4, 6), (3, 6, 8)], (3, 4, 8)), 2 * 3 * 4 * 6 * 8),
        (make("addmm.default", (A, B, C), [(8,), (4, 6), (6, 8)], (4, 8)), 2 * 4 * 6 * 8),
        (make("linear.default", (A, B), [(2, 3, 6), (8, 6)], (2, 3, 8)), 2 * 2 * 3 * 6 * 8),
        (make("gelu.default", (A,), [(4, 6)], (4, 6)), 24),
        (make("sum.default", (A,), [(4, 6)], ()), 24),
        (make("view.default", (A, (24,)), [(4, 6)], (24,)), 0),
        (
            make(
                "convolution.default",
                (A, B, None, *CONVOLUTION, 2),
                [(2, 4, 5, 5), (6, 2, 3, 3)],
                (2, 6, 5, 5),
            ),
            2 * (2 * 6 * 5 * 5) * (2 * 3 * 3),
        ),
        (
            make(
                "convolution_backward.default",
                (A, B, C, None, *CONVOLUTION, 1, (True, True, False)),
                [(2, 6, 5, 5), (2, 4, 5, 5), (6, 4, 3, 3)],
                (2, 4, 5, 5),
                (6, 4, 3, 3),
                None,
            ),
            2 * 2 * (2 * 6 * 5 * 5) * (4 * 3 * 3),
        ),
        (
            make(
                "_scaled_dot_product_flash_attention_for_cpu.default",
                (A, B, C),
                [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
                (2, 3, 5, 8),
                (2, 3, 5),
            ),
            2 * 2 * 2 * 3 * 5 * 7 * 8,
        ),
    ],
)
def test_flops(call: OpCall, expected: int) -> None:
    assert flops(call) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (make("mm.default", (A, B), [(4, 6), (6, 8)], (4, 8)), 4 * (24 + 48 + 32)),
        (make("view.default", (A, (24,)), [(4, 6)], (24,)), 0),
        (make("embedding.default", (A, B), [(1000, 8), (5,)], (5, 8)), 4 * (40 + 40 + 5)),
    ],
)
def test_traffic(call: OpCall, expected: int) -> None:
    assert traffic(call) == expected
