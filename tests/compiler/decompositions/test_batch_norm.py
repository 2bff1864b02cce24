"""A BatchNorm in training may be split along any dimension but the channels that has an element for each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ops.draw import aten
from tools.oracles.rules import TorchCall, describe
from weft.compiler.decompositions.table import legal_signatures
from weft.layout import Broadcast, Split

X = torch.rand(4, 6, 3)


def forward(training: bool = True) -> TorchCall:
    w, running = torch.rand(6), (torch.zeros(6), torch.ones(6))
    given: Any = (X, w, w, *running, training, 0.1, 1e-5)
    return aten("_native_batch_norm_legit_functional", *given)


def split_dims(call: TorchCall, parts: int) -> set[int]:
    """The dimensions, but that of the channels, along which the input may be split."""
    whole = describe(call)[0]
    inputs = {each.operands[0] for each in legal_signatures(whole, parts)}
    return {each.dim for each in inputs if isinstance(each, Split) and each.dim != 1}


@pytest.mark.parametrize(("parts", "dims"), [(2, {0, 2}), (3, {0, 2}), (4, {0}), (5, set())])
def test_each_rank_has_an_element(parts: int, dims: set[int]) -> None:
    assert split_dims(forward(), parts) == dims


def test_statistics_are_those_of_the_whole_batch() -> None:
    whole = describe(forward())[0]
    (found,) = (
        each
        for each in legal_signatures(whole, 2)
        if each.operands[0] == each.results[0] == Split(0)
    )
    assert set(found.operands[1:]) | set(found.results[1:]) == {Broadcast()}
