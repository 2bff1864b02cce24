from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tools.figures import PAGE, page
from weft.errors import UserError
from weft.hardware import call_seconds, device_kind, device_kinds, read_device_kind, update_seconds
from weft.hardware.devices import (
    DEVICES,
    OP_CLASSES,
    Product,
    op_class,
    parse_device_kind,
    product_of,
    read_yaml,
)
from weft.ops import OpCall, Operand, TensorSpec, flops
from weft.plain_yaml import LARGEST
from weft.units import Bytes


@pytest.fixture
def content() -> dict:
    return yaml.safe_load((DEVICES / "a100-sxm-80gb.yaml").read_text())


@pytest.mark.parametrize("name", device_kinds())
def test_each_kind_of_the_catalogue_is_named_as_its_file_and_has_sources(name: str) -> None:
    kind = device_kind(name)
    assert kind.name == name
    assert tuple(kind.efficiency) == OP_CLASSES
    content = yaml.safe_load((DEVICES / f"{name}.yaml").read_text())
    figures = set(content) - {"name", "device_type", "sources"}
    assert figures <= set(content["sources"])
    assert all(content["sources"].values())


def test_the_page_of_figures_is_that_of_the_files() -> None:
    assert PAGE.read_text() == page(), "python -m tools.figures writes docs/catalogue.md"


def test_units_are_those_of_the_keys() -> None:
    kind = device_kind("a100-sxm-80gb")
    assert kind.peaks["float16"] == 312e12
    assert kind.traffic == 2039e9
    assert kind.memory == 80 << 30
    assert kind.reserve == 1500 << 20
    assert kind.start == pytest.approx(4e-6)


def test_slowdown_is_that_of_the_file_or_none() -> None:
    assert device_kind("h100-sxm-80gb").slowdown == 1.189
    assert device_kind("v100-sxm2-16gb").slowdown == 1.0


def test_dtypes_without_a_peak_compute_as_float32() -> None:
    kind = device_kind("h100-sxm-80gb")
    assert kind.peak("complex64") == kind.peaks["float32"]
    assert kind.peak("float8_e4m3fn") == kind.peaks["float8"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("speed", 3, "no field is named 'speed'"),
        (
            "traffic_gb_per_second",
            0,
            "traffic_gb_per_second must be a number above 1e-09 and at most .*, got 0",
        ),
        ("traffic_gb_per_second", float("nan"), "traffic_gb_per_second must be a number"),
        ("memory_gib", True, "memory_gib must be a number above 0, got True"),
        (
            "memory_gib",
            1e40,
            "memory_gib must be a number above 0 and at most 1e\\+30, got 1e\\+40",
        ),
        ("start_microseconds", -1, "start_microseconds must be a number from 0 to 1e.09, got -1"),
        ("device_type", "tpu", "device_type must be one of cpu, cuda, got 'tpu'"),
        ("name", 3, "name must be a text, got 3"),
        ("peaks_tflops", {"float16": 3}, "peaks_tflops: float32 must be"),
        ("peaks_tflops", {"float32": 3, "float99": 1}, "no field is named 'float99'"),
        ("efficiency", {"product": {}}, "efficiency: attention must be given, got product"),
        (
            "slowdown",
            0.5,
            "slowdown must be a number from 1 to 100, got 0.5",
        ),
        ("tiles", [[1, 2]], r"tiles\[0\] must be \[rows, columns, share\]"),
        ("tiles", [[1, 2, 1.5]], "share must be a number above 0 and at most 1, got 1.5"),
    ],
)
def test_a_wrong_field_is_named(content: dict, key: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=f"mine.yaml.*{message}"):
        parse_device_kind({**content, key: value}, "mine.yaml")


def test_shares_are_at_most_one(content: dict) -> None:
    content["efficiency"]["product"] = {"compute": 1.1}
    with pytest.raises(UserError, match="efficiency: product: compute must be a number .* got 1.1"):
        parse_device_kind(content, "mine.yaml")


def test_a_missing_kind_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(UserError, match="no device kind is named 'h900'; there are a100-sxm-40gb"):
        device_kind("h900")


@pytest.mark.parametrize("text", ["4e-3", "4E-3", "-4e-3", "+4e3", "4.0e-3"])
def test_numbers_may_have_an_exponent(tmp_path: Path, text: str) -> None:
    """YAML 1.1 has no 4e-3."""
    (tmp_path / "one.yaml").write_text(f"a: {text}")
    assert read_yaml(tmp_path / "one.yaml") == {"a": float(text)}


def test_files_that_are_no_description(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_device_kind(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        read_device_kind(tmp_path / "bad.yaml")
    (tmp_path / "run.yaml").write_text("!!python/object/apply:os.getcwd []")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        read_device_kind(tmp_path / "run.yaml")
    (tmp_path / "twice.yaml").write_text("a: 1\nb: 2\na: 3")
    with pytest.raises(UserError, match="the key 'a' stands twice"):
        read_device_kind(tmp_path / "twice.yaml")
    (tmp_path / "large.yaml").write_text(" " * (LARGEST + 1))
    with pytest.raises(UserError, match="more than"):
        read_device_kind(tmp_path / "large.yaml")
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(UserError, match="must be a mapping from names, got \\[1\\]"):
        read_device_kind(tmp_path / "list.yaml")


# test_roofline

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
