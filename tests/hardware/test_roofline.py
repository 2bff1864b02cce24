from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.hardware import call_seconds, device_kind, device_kinds, update_seconds
from weft.hardware.devices import Product, op_class, product_of
from weft.ops import OpCall, Operand, TensorSpec, flops
from weft.units import Bytes

A100 = device_kind("a100-sxm-80gb")
SIZES = st.integers(1, 5000)


def mm(m: int, k: int, n: int, dtype: str = "float16") -> OpCall:
    a, b, c = (TensorSpec(shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    return OpCall("aten.mm.default", (Operand(0), Operand(1)), (), (a, b), (c,))


def unary(op: str, shape: tuple[int, ...], dtype: str = "float16") -> OpCall:
    spec = TensorSpec(shape, dtype)
    return OpCall(f"aten.{op}.default", (Operand(0),), (), (spec,), (spec,))


def test_large_products_reach_their_share_of_the_peak() -> None:
    call = mm(16384, 16384, 16384)
    rate = flops(call) / call_seconds(A100, call)
    share = A100.efficiency["product"].compute
    assert 0.95 * share < rate / A100.peaks["float16"] <= share


def test_float32_products_compute_at_their_own_peak() -> None:
    half, whole = (call_seconds(A100, mm(8192, 8192, 8192, x)) for x in ("float16", "float32"))
    assert whole / half == pytest.approx(312 / 19.5, rel=0.01)


def test_elementwise_calls_are_bound_by_memory() -> None:
    size = 1 << 28
    share = A100.efficiency["elementwise"].traffic
    expected = 4 * size / (A100.traffic * share) + A100.start
    assert call_seconds(A100, unary("relu", (size,))) == pytest.approx(expected)


def test_a_last_wave_that_is_idle_in_part_costs_as_a_full_one() -> None:
    """108 units: two tiles more than they hold at a time take another wave."""
    one = replace(A100, tiles=A100.tiles[2:3])
    full, more = (
        call_seconds(one, mm(128 * rows, 8192, 128 * columns)) - one.start
        for rows, columns in ((12, 9), (11, 10))
    )
    assert more / full == pytest.approx(2)


def test_the_sizes_of_products_come_from_rules() -> None:
    assert product_of(mm(2, 3, 4)) == Product(1, 2, 4, 3)
    a, b, c = (TensorSpec(shape, "float16") for shape in ((7, 2, 3), (7, 3, 4), (7, 2, 4)))
    bmm = OpCall("aten.bmm.default", (Operand(0), Operand(1)), (), (a, b), (c,))
    assert product_of(bmm) == Product(7, 2, 4, 3)
    bias = TensorSpec((4,), "float16")
    a, b, c = (TensorSpec(shape, "float16") for shape in ((2, 3), (3, 4), (2, 4)))
    args = (Operand(0), Operand(1), Operand(2))
    assert product_of(OpCall("aten.addmm.default", args, (), (bias, a, b), (c,))) == Product(
        1, 2, 4, 3
    )
    assert product_of(unary("relu", (3,))) is None


def test_views_take_no_time_and_unknown_ops_read_and_write_their_tensors() -> None:
    a, b = TensorSpec((4, 4), "float16"), TensorSpec((16,), "float16")
    view = OpCall("aten.view.default", (Operand(0), (16,)), (), (a,), (b,))
    assert call_seconds(A100, view) == 0
    unknown = OpCall("mine.own.default", (Operand(0),), (), (a,), (b,))
    share = A100.efficiency["elementwise"].traffic
    assert call_seconds(A100, unknown) == pytest.approx(A100.start + 64 / (A100.traffic * share))


def test_classes_of_ops() -> None:
    assert op_class(unary("_softmax", (3,))) == "normalisation"
    assert op_class(unary("relu", (3,))) == "elementwise"
    assert op_class(mm(1, 1, 1), product_of(mm(1, 1, 1))) == "product"
    assert op_class(unary("_scaled_dot_product_flash_attention", (3,))) == "attention"


def test_copies_to_the_host_take_what_the_link_to_it_needs() -> None:
    size = 2 * 4096 * 4096
    for op in ("offload", "load"):
        call = replace(unary("relu", (4096, 4096)), op=f"weft.{op}")
        taken = call_seconds(A100, call) - A100.start
        assert taken == pytest.approx(size / A100.host)
    assert size / A100.host > 10 * size / A100.traffic


def test_updates_move_bytes() -> None:
    share = A100.efficiency["update"].traffic
    expected = A100.start + 1e9 / (A100.traffic * share)
    assert update_seconds(A100, Bytes(10**9)) == pytest.approx(expected)


@given(st.sampled_from(device_kinds()), SIZES, SIZES, SIZES, st.integers(0, 2))
def test_products_never_pass_the_peak_and_grow_with_their_sizes(
    name: str, m: int, k: int, n: int, grown: int
) -> None:
    kind = device_kind(name)
    call = mm(m, k, n)
    seconds = call_seconds(kind, call)
    assert flops(call) / seconds <= kind.peak("float16")
    larger = [m, k, n]
    larger[grown] += 1
    assert call_seconds(kind, mm(*larger)) >= seconds
