"""The factor notation: parsing, and binding to the shapes of a call."""

from __future__ import annotations

import pytest

from weft.errors import RuleError
from weft.ops import OpCall, Operand, TensorSpec
from weft.ops.factors import WHOLE, Factors, bind, factor_sizes, parse_factors, without_broadcasts


def call(op: str, *shapes: tuple[int, ...], results: tuple[tuple[int, ...], ...]) -> OpCall:
    return OpCall(
        op,
        tuple(Operand(i) for i in range(len(shapes))),
        (),
        tuple(TensorSpec(shape, "float32") for shape in shapes),
        tuple(TensorSpec(shape, "float32") for shape in results),
    )


def test_parse_names_marks_and_ellipsis() -> None:
    equation = parse_factors("... m k+, _, k d! -> ... m, d 1")
    assert equation.operands == (("...", "m", "k"), None, ("k", "d"))
    assert equation.results == (("...", "m"), ("d", WHOLE))
    assert equation.contracted == {"k"}
    assert equation.whole == {"d"}


@pytest.mark.parametrize("text", ["m k, k n", "m -k -> m", "m k* -> m"])
def test_malformed_notation_is_refused(text: str) -> None:
    with pytest.raises(RuleError, match=r"->|not a factor"):
        parse_factors(text)


def test_ellipsis_aligns_at_the_right() -> None:
    factors = bind("... k+, ... k -> ...", call("x", (2, 3, 4), (3, 4), results=((2, 3),)))
    assert factors.operands == (("...@1", "...@0", "k"), ("...@0", "k"))
    assert factors.results == (("...@1", "...@0"),)
    assert factors.contracted == {"k"}


def test_marked_ellipsis_marks_every_leading_dimension() -> None:
    factors = bind("...+ e -> e", call("x", (2, 3, 4), results=((4,),)))
    assert factors.contracted == {"...@0", "...@1"}


def test_tensors_with_fewer_dimensions_carry_the_last_factors() -> None:
    factors = bind("m n, m k+, k n -> m n", call("x", (6,), (4, 5), (5, 6), results=((4, 6),)))
    assert factors.operands[0] == ("n",)


def test_stretched_dimensions_carry_no_factor() -> None:
    one = call("x", (1, 6), (4, 6), results=((4, 6),))
    factors = without_broadcasts(one, bind("m n, m n -> m n", one))
    assert factors.operands == ((WHOLE, "n"), ("m", "n"))
    assert factor_sizes(one, factors) == {"m": (4,), "n": (6,)}


def test_a_factor_of_size_one_everywhere_is_kept() -> None:
    one = call("x", (1, 6), results=((1, 6),))
    assert without_broadcasts(one, bind("m n -> m n", one)).operands == (("m", "n"),)


def test_a_factor_of_size_one_is_kept_beside_a_size_that_no_shape_shows() -> None:
    one = call("x", (1,), results=((1,),))
    factors = Factors((("s",),), (("s",),), hidden=(("s", 4),))
    kept = without_broadcasts(one, factors)
    assert kept == factors
    assert factor_sizes(one, kept) == {"s": (1, 4)}


def test_wrong_number_of_tensors_names_rule_and_op() -> None:
    with pytest.raises(RuleError, match=r"m k\+, k n -> m n.*aten\.mm"):
        bind("m k+, k n -> m n", call("aten.mm", (2, 3), (3, 4), (4,), results=((2, 4),)))


def test_too_many_dimensions_are_refused() -> None:
    with pytest.raises(RuleError, match="2 dimensions of a tensor that has 3"):
        bind("m k -> m k", call("x", (2, 3, 4), results=((2, 3),)))
