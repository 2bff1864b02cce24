"""Whole numbers of Python, numpy and torch are taken; all else is named."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft.errors import UserError
from weft.program.data.order import whole_number, whole_numbers


@pytest.mark.parametrize(
    "given",
    [
        [3, 1, 2],
        (3, 1, 2),
        [np.int64(3), np.uint8(1), 2],
        np.array([3, 1, 2]),
        np.array([3, 1, 2], dtype=np.uint16),
        torch.tensor([3, 1, 2]),
        list(torch.tensor([3, 1, 2])),
        (each for each in (3, 1, 2)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_numbers_of_any_kind(given: Any) -> None:
    found = whole_numbers(given, "lengths")
    assert found == [3, 1, 2]
    assert all(type(each) is int for each in found)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["a"], "got 'a', a str, at place 0"),
        ([1, 2.0], r"got 2\.0, a float, at place 1"),
        ([1, None], "a NoneType, at place 1"),
        ([1, True], "a bool, at place 1"),
        ([1, -1], "got -1, a int, at place 1"),
        (np.array([1.0]), "a float, at place 0"),
        (np.array([True]), "a bool, at place 0"),
        ([np.bool_(True)], "at place 0"),
        ([torch.tensor(True)], "a Tensor, at place 0"),
        (np.array([[1]]), "an array of one dimension"),
        (torch.tensor(3), "an array of one dimension"),
        ("12", "as a list or an array"),
        ({0: 1}, "as a list or an array"),
        (MappingProxyType({0: 1}), "as a list or an array"),
        ({1, 2}, "as a list or an array"),
        (3, "as a list or an array"),
    ],
)
def test_all_else_is_named(given: Any, why: str) -> None:
    with pytest.raises(UserError, match=f"^lengths must be whole numbers from 0.*{why}"):
        whole_numbers(given, "lengths")


def test_a_number_of_numpy_is_one() -> None:
    assert whole_number(np.int32(4)) == 4
    assert whole_number("4") is None


def test_a_loader_takes_them() -> None:
    data = [torch.full((1,), n) for n in range(4)]
    lengths = [1, 9, 5, 9]
    plain = weft.Loader(data, 2, lengths=lengths)
    other = weft.Loader(data, np.int64(2), seed=np.int64(0), lengths=np.array(lengths))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in plain] == [batch.tolist() for batch in other]
    assert other.state_dict() == plain.state_dict()
    assert type(other.state_dict()["batch_size"]) is int
    with pytest.raises(UserError, match=r"weft\.Loader: lengths must be .* got 'a'"):
        weft.Loader(data, 2, lengths=["a"])  # type: ignore[list-item]
    packed = weft.Packed([[1, 2], [3]], np.int64(3), lengths=np.array([2, 1]))  # type: ignore[arg-type]
    assert packed[0]["tokens"].tolist() == [1, 2, 3]
