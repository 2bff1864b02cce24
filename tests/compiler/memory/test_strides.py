"""Values that may lie out of order in memory are found; what lies in order for sure is not among them."""

from __future__ import annotations

import pytest

from build import ref
from weft.compiler.memory.strides import merges, out_of_order
from weft.ir.plan import Compute, Feed, LocalCall, LocalInput, LocalValue, RankPlan, Register
from weft.ops.call import Token

X = LocalValue("x", (4, 6), "float32")


def made(
    op: str, *arguments: object, shape: tuple[int, ...], name: str = "y", **options: object
) -> LocalCall:
    args = tuple(ref(a) if isinstance(a, str) else a for a in arguments)
    value = LocalValue(name, shape, "float32")
    return LocalCall.of(op, args, (value,), kwargs=tuple(options.items()))  # type: ignore[arg-type]


def found(*calls: LocalCall) -> frozenset[str]:
    feed, segment = Feed(0, ("x",), ("x",)), Compute(1, calls, ("x",), ())
    registers = (Register(X, "batch", 0, (1,)),)
    return out_of_order(RankPlan(0, (LocalInput(X, "batch", "x"),), (feed, segment), registers))


TURNED = made("aten.t.default", "x", shape=(6, 4), name="t")
COLUMNS = made("aten.slice.Tensor", "x", 1, 0, 3, shape=(4, 3), name="c")
CONTIGUOUS = Token("memory_format", "contiguous_format")


def test_views() -> None:
    assert found(TURNED) == {"t"}
    assert found(COLUMNS) == {"c"}
    assert found(made("aten.slice.Tensor", "x", 0, 0, 2, shape=(2, 6))) == set()
    assert found(made("aten.select.int", "x", 1, 0, shape=(4,))) == {"y"}
    assert found(made("aten.select.int", "x", 0, 0, shape=(6,))) == set()
    assert found(made("aten.expand.default", "x", (2, 4, 6), shape=(2, 4, 6))) == {"y"}
    assert found(made("aten.reshape.default", "x", (24,), shape=(24,))) == set()
    assert found(TURNED, made("aten.unsqueeze.default", "t", 0, shape=(1, 6, 4))) == {"t", "y"}


def test_kernels_turn_results_as_operands_and_leave_no_gaps() -> None:
    assert found(TURNED, made("aten.neg.default", "t", shape=(6, 4))) == {"t", "y"}
    assert found(COLUMNS, made("aten.neg.default", "c", shape=(4, 3))) == {"c"}
    assert found(TURNED, made("aten.sum.default", "t", shape=())) == {"t"}


def test_what_lies_in_order_whatever_it_was_made_of() -> None:
    assert found(TURNED, made("aten.mm.default", "t", "t", shape=(6, 4))) == {"t"}
    assert found(TURNED, made("weft.slice", "t", 0, 0, 3, shape=(3, 4))) == {"t"}
    copy = made("aten.clone.default", "t", shape=(6, 4), memory_format=CONTIGUOUS)
    assert found(TURNED, copy) == {"t"}


@pytest.mark.parametrize(
    ("shape", "after", "joined"),
    [
        ((4, 6), (24,), True),
        ((4, 6), (4, 2, 3), False),
        ((4, 6), (2, 12), True),
        ((4, 1, 6), (1, 4, 6), False),
        ((2, 3, 4), (2, 12), True),
        ((0, 3), (0,), False),
    ],
)
def test_dimensions_that_a_reshape_joins(
    shape: tuple[int, ...], after: tuple[int, ...], joined: bool
) -> None:
    assert merges(shape, after) is joined
