"""Two neighbouring parts of a dimension in the other order, as calls."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.logical import Arg, Call, Ref, Value
from weft.ops.call import Token

VIEW, TRANSPOSE, CLONE = "aten.view.default", "aten.transpose.int", "aten.clone.default"
_CONTIGUOUS = Token("memory_format", "contiguous_format")


def turned(
    like: Call, source: Value, cut: tuple[int, ...], dim: int, made: Value
) -> Iterator[Call]:
    """View `source` as `cut`, swap dimensions `dim` and `dim + 1`, and view that as `made`; where `like` stands."""
    swapped = (*cut[:dim], cut[dim + 1], cut[dim], *cut[dim + 2 :])
    turns = [Value(f"{made.name}.turn{i}", cut if not i else swapped, made.dtype) for i in range(3)]

    def call(op: str, before: Value, after: Value, *args: Arg, **kwargs: Arg) -> Call:
        arguments = (Ref(before.name), *args)
        return Call(op, arguments, tuple(kwargs.items()), (after,), like.location, like.phase)

    yield call(VIEW, source, turns[0], cut)
    yield call(TRANSPOSE, turns[0], turns[1], dim, dim + 1)
    yield call(CLONE, turns[1], turns[2], memory_format=_CONTIGUOUS)
    yield call(VIEW, turns[2], made, made.shape)
