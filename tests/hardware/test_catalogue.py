"""The catalogue, names with a number of devices, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import UserError
from weft.hardware.devices import read_yaml
from weft.hardware.topology_files import LINKS, TOPOLOGIES, link_kinds, topologies, topology


@pytest.mark.parametrize("name", topologies())
def test_every_topology(name):
    found = topology(name)
    assert found.name == name
    assert read_yaml(TOPOLOGIES / f"{name}.yaml")["source"]
    assert {found.kind(device).device_type for device in range(len(found))} == {"cuda"}
    larger = topology(f"{name}x{3 * len(found) + 1}")
    assert len(larger) == 3 * len(found) + 1


def test_what_is_asked_for_is_there():
    expected = {
        *("flexflow-p100", "flexflow-k80", "v100", "p3.16xlarge", "a100-40gb", "a100-80gb"),
        *("selene", "h100", "h200", "b200", "gb200-nvl72", "gh200"),
        *("b300", "gb300-nvl72", "alpa-titanx"),
    }
    assert expected <= set(topologies())
    assert (len(topology("flexflow-p100")), len(topology("flexflow-k80"))) == (16, 64)
    assert topology("flexflow-k80").node(63) == 15


def test_links_have_sources():
    for name, fields in read_yaml(LINKS).items():
        assert fields["source"], name
        assert "source" in fields.get("calibrated", {"source"}), name


def test_figures_alone():
    fitted, published = link_kinds()["nvlink3"], link_kinds(calibrated=False)["nvlink3"]
    assert fitted.rate == published.rate == 25e9
    assert fitted.own
    assert published.own is None


def test_names():
    whole = topology("h100x512")
    assert (len(whole), whole.node(511), whole.kind(0).name) == (512, 63, "h100-sxm-80gb")
    assert topology(whole) is whole
    assert len(topology("p3.16xlargex16")) == 16
    with pytest.raises(UserError, match="no topology is named 'H100'; did you mean 'h100'?"):
        topology("H100x8")
    with pytest.raises(UserError, match="no topology is named 'h10'; did you mean 'h100'?"):
        topology("h10x8")
    for name in ("h100x0", "h100x999999999"):
        with pytest.raises(UserError, match="devices must be a whole number from 1 to 1048576"):
            topology(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read as YAML"),
        ("a: 1\na: 2", "the key 'a' stands twice"),
        ("&a [*a]", "contains itself"),
        ("[" * 2000, "cannot be read as YAML"),
        ("x: !!python/object/apply:os.system ['true']", "cannot be read as YAML"),
        ("? [1]\n: 2", "cannot be read as YAML"),
        ("weft_topology: 1\nnodes: &n [*n]", "contains itself"),
        ("x: 2020-99-99", "cannot be read as YAML"),
        ("a" * ((1 << 20) + 1), "has more than"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        topology(str(path))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        topology(tmp_path / "none.yaml")
