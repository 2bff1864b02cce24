"""Which kernels run on a device: sums of products, large products, slow norms."""

from __future__ import annotations

import pytest

from build import ref
from weft.compiler.plans.specialize import Target, join_sums, specialize, variant
from weft.ir import parse_plan
from weft.ir.plan import Compute, LocalCall, LocalValue

CPU, ONEDNN, CUDA = Target("cpu"), Target("cpu", onednn=True), Target("cuda", onednn=True)
FORWARD = "aten._native_batch_norm_legit_functional.default"
BACKWARD = "aten.native_batch_norm_backward.default"
MM = "aten.mm.default"


def call(op: str, made: str, *args: object, dtype: str = "float32") -> LocalCall:
    return LocalCall.of(op, args, (LocalValue(made, (4, 4), dtype),))


def product(dtype: str = "float32") -> LocalCall:
    return call(MM, "product", ref("a"), ref("b"), dtype=dtype)


def total(reduction: str = "sum", dtype: str = "float32") -> LocalCall:
    return call("weft.accumulate", "total", ref("product"), reduction, dtype=dtype)


@pytest.mark.parametrize(
    ("calls", "outputs", "expected"),
    [
        ([product(), total()], ("total",), True),
        ([product(), total()], ("product", "total"), False),
        (
            [product(), call("aten.neg.default", "n", ref("product")), total()],
            ("n", "total"),
            False,
        ),
        ([product(), total("max")], ("total",), False),
        ([product("bfloat16"), total(dtype="bfloat16")], ("total",), False),
    ],
    ids=["alone", "returned", "read", "maximum", "short floats"],
)
def test_a_product_is_joined_with_its_sum_where_nobody_else_sees_it(
    calls: list[LocalCall], outputs: tuple[str, ...], expected: bool
) -> None:
    nodes, places = join_sums(calls, outputs)
    assert (len(nodes) < len(calls)) == expected
    assert len(places) == len(calls) + 1
    assert places[-1] == len(nodes)


@pytest.mark.parametrize(
    ("shape", "dtype", "target", "runs"),
    [
        ((256, 256), "float32", ONEDNN, "weft.large_mm"),
        ((256, 256), "float32", CPU, MM),
        ((256, 256), "float32", CUDA, MM),
        ((256, 256), "float64", ONEDNN, MM),
        ((16, 16), "float32", ONEDNN, MM),
    ],
)
def test_which_products_may_go_to_onednn(
    shape: tuple[int, ...], dtype: str, target: Target, runs: str
) -> None:
    made = (LocalValue("y", shape, dtype),)
    assert variant(LocalCall.of(MM, (ref("a"), ref("b")), made), target).op == runs


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "target", "runs"),
    [
        (FORWARD, (16, 256, 8, 8), "float32", CPU, "weft.batch_norm"),
        (FORWARD, (16, 256, 8, 8), "float64", CPU, FORWARD),
        (FORWARD, (16, 256, 8, 8), "float32", CUDA, FORWARD),
        (FORWARD, (16, 256, 7, 8), "float32", CPU, FORWARD),
        (FORWARD, (2, 256, 8, 8), "float32", CPU, FORWARD),
        (BACKWARD, (16, 256, 2, 2), "float32", CPU, "weft.batch_norm_backward"),
        (BACKWARD, (16, 256, 1, 1), "float32", CPU, BACKWARD),
        (BACKWARD, (16, 256, 4, 4), "float32", CPU, BACKWARD),
        ("aten.relu.default", (16, 256, 8, 8), "float32", CPU, "aten.relu.default"),
    ],
)
def test_which_norms_are_taken_apart(
    op: str, shape: tuple[int, ...], dtype: str, target: Target, runs: str
) -> None:
    args = (*(ref(name) for name in "xwbmv"), True, 0.1, True)
    made = LocalCall.of(op, args, (LocalValue("y", shape, dtype),))
    assert variant(made, target) == made.changed(op=runs)


# Two gradients in micro-batches; the second part begins at a product that goes.
PLAN = """plan "p"
rank 0 micro 2
input %x = batch "x" : float32[256, 256]
input %w = parameter "w" : float32[256, 256]
register %x : float32[256, 256] batch credits 2 rate 2 from 0 to [2]
register %w : float32[256, 256] parameter credits 1 from 1 to [2] full
register %g : float32[256, 256] gradient credits 1 from 2 to [3]
register %h : float32[256, 256] gradient credits 1 from 2 to [3]
actor 0 on "compute" compute [] -> [%x] acts 2
  %x = call weft.uniform([256, 256], [0, 0], [256, 256], 1, dtype=!dtype:float32) : float32[256, 256]
actor 1 on "host" hold %w
actor 2 on "compute" compute [%x, %w] -> [%g, %h] acts 2 parts [2, 4]
  %y = call aten.mm.default(%x, %w) : float32[256, 256]
  %p = call aten.mm.default(%y, %x) : float32[256, 256]
  %q = call aten.mm.default(%x, %y) : float32[256, 256]
  %g = call weft.accumulate(%p, "sum") : float32[256, 256]
  %h = call weft.accumulate(%q, "sum") : float32[256, 256]
actor 3 on "host" fetch "g" %g, "h" %h
"""


def test_parts_begin_at_what_follows_a_product_that_is_gone() -> None:
    (plan,) = parse_plan(PLAN).ranks
    segment = specialize(plan, ONEDNN).actors[2]
    assert isinstance(segment, Compute)
    assert [getattr(node, "op", "") for node in segment.nodes] == [
        "weft.large_mm",
        "weft.accumulate_mm",
        "weft.accumulate_mm",
    ]
    assert segment.parts == (1, 2)
