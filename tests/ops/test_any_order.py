"""Ops that are said not to care in which order rows stand, run on rows in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ops.draw import GENERATOR, aten, f, i
from ops.rule_samples import FAMILIES
from tools.oracles.rules import UNINITIALIZED, TorchCall, describe, run_call
from weft.ops.any_order import rows_of
from weft.ops.call import OpCall


def _choices(call: OpCall) -> Iterator[tuple[int, int, int]]:
    """Each dimension of each operand, with its size."""
    for operand, spec in enumerate(call.operands):
        for dim, size in enumerate(spec.shape):
            if size > 1:
                yield operand, dim, size


def _wrong(sample: TorchCall) -> Iterator[str]:
    whole, tensors, expected = describe(sample)
    for operand, dim, size in _choices(whole):
        found = rows_of(whole, {operand: dim}, size)
        if found is None or whole.op in UNINITIALIZED:
            continue
        order = torch.randperm(size, generator=GENERATOR)
        turned = [_in_order(x, at, order) for x, at in zip(tensors, found[0], strict=True)]
        for made, one, at in zip(run_call(whole, turned), expected, found[1], strict=True):
            if one is not None and not _equal(made, _in_order(one, at, order)):
                yield f"{whole.op}, dimension {dim} of operand {operand}"


def _equal(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return found is not None and torch.allclose(found, expected, equal_nan=True)


def _in_order(x: torch.Tensor, dim: int | None, order: torch.Tensor) -> torch.Tensor:
    return x if dim is None else x.index_select(dim, order)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_results_follow_the_rows(family: Callable[[], Iterator[TorchCall]]) -> None:
    GENERATOR.manual_seed(7)
    assert [line for sample in family() for line in _wrong(sample)] == []


@pytest.mark.parametrize(
    ("sample", "operand", "places"),
    [
        (aten("mm", f(6, 4), f(4, 3)), 0, ((0, None), (0,))),
        (aten("mm", f(3, 6), f(6, 4)), 1, ((1, 0), (None,))),
        (aten("t", f(6, 4)), 0, ((0,), (1,))),
        (aten("_log_softmax", f(6, 4), 1, False), 0, ((0,), (0,))),
        (aten("nll_loss_forward", f(6, 4), i(4, 6), None, 2, -100), 1, ((0, 0), (None, None))),
        (aten("view", f(6, 4), (6, 2, 2)), 0, ((0,), (0,))),
    ],
)
def test_where_the_rows_are(
    sample: TorchCall, operand: int, places: tuple[tuple[int | None, ...], ...]
) -> None:
    assert rows_of(describe(sample)[0], {operand: 0}, 6) == places


@pytest.mark.parametrize(
    "sample",
    [
        aten("cumsum", f(6, 4), 0),
        aten("tril", f(6, 6)),
        aten("view", f(6, 4), (3, 2, 4)),
        aten("slice.Tensor", f(6, 4), 0, 1, 6),
        aten("_log_softmax", f(6, 4), 0, False),
    ],
)
def test_ops_that_care(sample: TorchCall) -> None:
    assert rows_of(describe(sample)[0], {0: 0}, 6) is None
