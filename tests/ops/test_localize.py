"""What one rank runs: local shapes and adapted arguments, also axis by axis."""

from __future__ import annotations

from typing import Any

from weft.layout import SBP, Broadcast, Partial, Split
from weft.ops import OpCall, Operand, Signature, TensorSpec, Token, localize, signatures

A, B, C = Operand(0), Operand(1), Operand(2)


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "float32")


def signature(call: OpCall, parts: int, *operands: SBP) -> Signature:
    """The declared signature with these operands."""
    return next(one for one in signatures(call, parts) if one.operands == operands)


def make(op: str, *args: Any, operands: tuple[TensorSpec, ...], result: TensorSpec) -> OpCall:
    return OpCall(op, args, (), operands, (result,))


def test_view_takes_the_local_sizes_and_allows_a_copy() -> None:
    call = make("aten.view.default", A, (-1, 2, 3), operands=(spec(5, 6),), result=spec(5, 2, 3))
    chosen = signature(call, 2, Split(0))
    shards = [localize(call, chosen, 2, index) for index in range(2)]
    assert [one.args[1] for one in shards] == [(3, 2, 3), (2, 2, 3)]
    assert {one.op for one in shards} == {"aten.reshape.default"}
    assert [one.operands[0].shape for one in shards] == [(3, 6), (2, 6)]


def test_squeeze_keeps_a_dimension_whose_shard_has_one_element() -> None:
    call = make("aten.squeeze.default", A, operands=(spec(2, 1, 3),), result=spec(2, 3))
    local = localize(call, signature(call, 2, Split(0)), 2, 0)
    assert (local.op, local.args) == ("aten.reshape.default", (A, (1, 3)))


def test_embedding_rows_nest_over_two_axes() -> None:
    call = make("aten.embedding.default", A, B, operands=(spec(10, 4), spec(3)), result=spec(3, 4))
    offsets = []
    for first in range(2):
        outer = localize(call, signature(call, 2, Split(0), Broadcast()), 2, first)
        for second in range(2):
            inner = localize(outer, signature(outer, 2, Split(0), Broadcast()), 2, second)
            assert inner.op == "weft.embedding_shard"
            assert inner.args[3] == 10  # of the whole table
            offsets.append((inner.args[2], inner.operands[0].shape[0]))
    assert offsets == [(0, 3), (3, 2), (5, 3), (8, 2)]


def test_embedding_gradient_rows_nest_over_two_axes() -> None:
    call = make(
        "aten.embedding_dense_backward.default",
        *(A, B, 10, -1, False),
        operands=(spec(3, 4), spec(3)),
        result=spec(10, 4),
    )
    rows = Signature((Broadcast(), Broadcast()), (Split(0),))
    inner = localize(localize(call, rows, 2, 1), rows, 2, 1)
    assert inner.op == "weft.embedding_dense_backward_shard"
    assert inner.args == (A, B, 2, 8, -1, False)
    assert inner.results == (spec(2, 4),)


def test_uniform_moves_its_block_over_two_axes() -> None:
    call = OpCall(
        "weft.uniform",
        ((5, 6), (0, 0), (5, 6), 7),
        (("dtype", Token("dtype", "float32")),),
        (),
        (spec(5, 6),),
    )
    rows, columns = Signature((), (Split(0),)), Signature((), (Split(1),))
    assert rows in signatures(call, 2)
    local = localize(localize(call, rows, 2, 1), columns, 3, 2)
    assert local.args == ((5, 6), (3, 4), (2, 2), 7)
    nested = localize(localize(call, rows, 2, 0), rows, 2, 1)
    assert nested.args == ((5, 6), (2, 0), (1, 6), 7)


def test_ranges_start_at_the_offset() -> None:
    call = OpCall("aten.arange.default", (9,), (), (), (TensorSpec((9,), "int64"),))
    local = localize(call, Signature((), (Split(0),)), 2, 1)
    assert (local.op, local.args) == ("aten.arange.start_step", (5, 9, 1))


def test_triangles_move_their_diagonal() -> None:
    call = make("aten.tril.default", A, operands=(spec(6, 6),), result=spec(6, 6))
    assert localize(call, signature(call, 2, Split(0)), 2, 1).args == (A, 3)
    assert localize(call, signature(call, 2, Split(1)), 2, 1).args == (A, -3)
    assert localize(call, signature(call, 2, Partial()), 2, 1).args == (A, 0)


def test_groups_of_a_convolution_are_split_with_its_channels() -> None:
    rest = ((1,), (1,), (1,), False, (0,), 4)
    call = make(
        "aten.convolution.default",
        *(A, B, None, *rest),
        operands=(spec(2, 8, 9), spec(4, 2, 3)),
        result=spec(2, 4, 9),
    )
    local = localize(call, signature(call, 2, Split(1), Split(0)), 2, 0)
    assert local.args[8] == 2
    assert [one.shape for one in local.operands] == [(2, 4, 9), (2, 2, 3)]
    assert not any(one.operands == (Split(1), Split(0)) for one in signatures(call, 3))


def test_broadcast_leaves_a_call_as_it_is() -> None:
    call = make("aten.mm.default", A, B, operands=(spec(4, 6), spec(6, 8)), result=spec(4, 8))
    assert localize(call, signatures(call, 2)[0], 2, 1) == call
