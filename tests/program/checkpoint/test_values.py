"""Python's values come back from JSON as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import UserError
from weft.program.checkpoint.values import from_json, to_json

single = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float32, torch.bool])
)
keys = st.text() | st.integers() | st.sampled_from(["__weft__", "value"])
values = st.recursive(
    single,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.frozensets(st.integers())
        | st.sets(st.text())
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(values)
def test_values_come_back(value: Any) -> None:
    text = json.dumps(to_json(value, "x", {}), allow_nan=False)
    found = from_json(json.loads(text), "x", {})
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, set | dict | list | tuple | frozenset)


def test_tensors_are_kept_apart() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.arange(3), 1.5], "b": float("nan")}
    content = json.loads(json.dumps(to_json(value, "extra", tensors)))
    assert list(tensors) == ["extra.0"]
    found = from_json(content, "extra", tensors)
    assert torch.equal(found["a"][0], torch.arange(3))
    assert found["b"] != found["b"]


@pytest.mark.parametrize("value", [object(), lambda: 0, {"a": [print]}, iter(())])
def test_what_json_cannot_hold_is_named(value: Any) -> None:
    with pytest.raises(UserError, match=r"extra.* is a .*; a checkpoint can hold"):
        to_json(value, "extra", {})


def test_names_of_tensors_never_meet() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    for value in ({"a": {"b": one}, "a.b": two}, {1: one, "1": two}):
        tensors: dict[str, torch.Tensor] = {}
        content = json.loads(json.dumps(to_json(value, "extra", tensors)))
        found = from_json(content, "extra", tensors)
        assert len(tensors) == 2
        assert str(found) == str(value)


def test_lists_without_end_are_refused() -> None:
    value: Any = []
    for _ in range(600):
        value = [value]
    with pytest.raises(UserError, match="nested too deep"):
        from_json(value, "extra", {})


def test_what_is_nested_without_end_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UserError, match="nested more than"):
        to_json(value, "extra", {})


@pytest.mark.parametrize(
    "content",
    [
        {"__weft__": "no such"},
        {"__weft__": "float", "value": [1]},
        {"__weft__": "float", "value": 10**400},
        {"__weft__": "complex", "value": [10**400, 1]},
        {"__weft__": "complex", "value": [1]},
        {"__weft__": "dtype", "value": "_dynamo"},
        {"__weft__": "set", "value": [[1]]},
        {"__weft__": "dtype", "value": "load"},
        {"__weft__": "dict", "value": [[1]]},
        {"__weft__": "tensor"},
        {"__weft__": "bytes", "value": "zz"},
        {"__weft__": "tuple", "value": 3},
        {"__weft__": ["float"], "value": 3},
    ],
)
def test_damaged_values_are_named(content: Any) -> None:
    with pytest.raises(UserError, match=r"x\.0 is damaged"):
        from_json([content], "x", {})
