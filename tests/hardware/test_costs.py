"""Costs that a user gives in a file."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from strategies import law
from weft.errors import UserError
from weft.hardware.costs import CostOverrides, parse_cost_overrides, read_cost_overrides


def test_given_costs_are_read(tmp_path):
    path = tmp_path / "costs.yaml"
    content = {
        "ops": {"aten.mm.default": 1e-4},
        "modules": {"blocks.*": {"forward": 7.7e-3}},
        "stages": {"0": {"forward": 0.01, "backward": 0.02, "weight": 0.0}, "*": {"forward": 1}},
        "exchanges": {"transfer": 6e-4},
    }
    path.write_text(yaml.safe_dump(content))
    found = read_cost_overrides(path)
    assert found == CostOverrides(
        content["ops"], content["modules"], content["stages"], content["exchanges"], str(path)
    )
    assert found.of_stage(0)["weight"] == 0.0
    assert found.of_stage(5) == {"forward": 1.0}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "must have one or more of ops"),
        ({"op": {}}, "no field is named 'op'"),
        ({"ops": {"aten.mm.default": -1}}, "ops: aten.mm.default must be a number from 0, got -1"),
        ({"ops": {"aten.mm.default": True}}, "got True"),
        ({"ops": {"aten.mm.default": float("nan")}}, "got nan"),
        (
            {"stages": {"first": {"forward": 1.0}}},
            "stages: a key must be a stage's number in quotes, or",
        ),
        ({"stages": {"0": {"forwards": 1.0}}}, "no field is named 'forwards'"),
        ({"exchanges": {"broadcast": 1.0}}, "no field is named 'broadcast'"),
        ({"modules": ["blocks"]}, "must be a mapping from names, got"),
        ([], "must be a mapping from names, got"),
    ],
)
def test_costs_that_make_no_sense_are_refused(content, said):
    with pytest.raises(UserError, match=said) as error:
        parse_cost_overrides(content, "costs.yaml")
    assert "costs.yaml" in str(error.value)


SCALARS = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=6)
NAMES = st.sampled_from(("ops", "stages", "modules", "exchanges", "0", "*", "forward", "transfer"))


@law(60)
@given(st.recursive(SCALARS, lambda inner: st.dictionaries(NAMES, inner) | st.lists(inner)))
def test_whatever_stands_in_a_file_only_user_errors_are_raised(content):
    try:
        found = parse_cost_overrides(content, "costs.yaml")
    except UserError:
        return
    assert isinstance(found, CostOverrides)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml cannot be read"):
        read_cost_overrides(tmp_path / "none.yaml")
