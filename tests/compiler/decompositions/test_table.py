"""Calls that families take apart: on a grid, what stands in their place is legal along every axis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ops.draw import aten
from tools.oracles.rules import TorchCall, describe
from weft.compiler.assignment import Assignment
from weft.compiler.decompositions.table import expand, legal_signatures
from weft.compiler.layouts.box import box
from weft.compiler.signatures import check_signatures
from weft.ir.logical import Call, Input, Location, LogicalGraph, Value
from weft.layout import Layout, placement
from weft.ops import OpCall, Signature, localize

GRID = placement("cpu", [[0, 1], [2, 3]])
A = torch.ops.aten


def norms(dtype: torch.dtype) -> Iterator[TorchCall]:
    """BatchNorms of `dtype` with statistics in float32, forward and backward, with and without weights."""
    x, g = torch.rand(4, 6, 4).to(dtype), torch.rand(4, 6, 4).to(dtype)
    w, running = torch.rand(6), (torch.zeros(6), torch.ones(6))
    for weight in (w, None):
        given = x, weight, weight, *running, True, 0.1, 1e-5
        yield aten("_native_batch_norm_legit_functional", *given)
        saved = A._native_batch_norm_legit_functional.default(*given)[1:3]
        mask = (True, weight is not None, weight is not None)
        yield aten("native_batch_norm_backward", g, x, weight, *running, *saved, True, 1e-5, mask)


def softmaxes() -> Iterator[TorchCall]:
    x, g = torch.rand(4, 6), torch.rand(4, 6)
    yield aten("_log_softmax", x, 1, False)
    yield aten("_log_softmax_backward_data", g, x.log_softmax(1), 1, x.dtype)


SAMPLES = (*norms(torch.float32), *norms(torch.bfloat16), *softmaxes())


def alone(call: OpCall, layouts: tuple[Signature, ...]) -> tuple[LogicalGraph, Assignment]:
    """A graph of one call, with a signature along each axis."""
    names = [f"x{number}" for number in range(len(call.operands))]
    made = [
        spec and Value(f"y{number}", spec.shape, spec.dtype)
        for number, spec in enumerate(call.results)
    ]
    given = zip(names, call.operands, strict=True)
    inputs = [Input(Value(name, spec.shape, spec.dtype), "batch", name) for name, spec in given]
    node = Call(call, tuple(names), tuple(made), Location("model.py", 1))
    reads = tuple(
        Layout(GRID, sbps) for sbps in zip(*(one.operands for one in layouts), strict=True)
    )
    writes = [Layout(GRID, sbps) for sbps in zip(*(one.results for one in layouts), strict=True)]
    values = dict(zip(names, reads, strict=True))
    values |= {value.name: lies for value, lies in zip(made, writes, strict=True) if value}
    return LogicalGraph("one call", (*inputs, node)), Assignment(values, {len(inputs): reads})


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.op.split(".")[1])
def test_parts_are_legal_along_both_axes(sample: TorchCall) -> None:
    call, _, _ = describe(sample)
    apart = 0
    for outer in legal_signatures(call, 2):
        for inner in legal_signatures(localize(call, outer, 2, 0), 2):
            graph, assignment = expand(*alone(call, (outer, inner)))
            check_signatures(box(graph, assignment))
            apart += len(list(graph.of_kind(Call))) > 1
    assert apart
