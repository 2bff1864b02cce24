from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tools.figures import PAGE, page
from weft.errors import UserError
from weft.hardware import device_kind, device_kinds, read_device_kind
from weft.hardware.devices import DEVICES, OP_CLASSES, parse_device_kind, read_yaml
from weft.plain_yaml import LARGEST


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
    with pytest.raises(UserError, match="is no YAML"):
        read_device_kind(tmp_path / "bad.yaml")
    (tmp_path / "run.yaml").write_text("!!python/object/apply:os.getcwd []")
    with pytest.raises(UserError, match="is no YAML"):
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
