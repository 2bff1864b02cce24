"""A step in micro-batches makes what the step of the whole batch makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from interpreter import run
from models import (
    GPT,
    MLP,
    classification_loss,
    token_batch,
    token_loss,
    vector_batch,
)
from weft.capture import capture
from weft.compiler.loops import cut_leaves, loop_values
from weft.compiler.microbatch import split_time
from weft.ir import parse_graph, verify
from weft.ir.logical import Call, Input, LogicalGraph, node_uses


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


Loss = Callable[[nn.Module, Any], Any]


def captured(model: nn.Module, loss_fn: Loss, batch: Any) -> tuple[LogicalGraph, Any]:
    """The whole-batch graph, and the values of its inputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = capture(model, loss_fn, optimizer, batch)
    tensors = {("parameter", name): p.detach() for name, p in model.named_parameters()}
    tensors |= {("buffer", name): b for name, b in model.named_buffers()}
    tensors |= {("batch", key): x for key, x in step.batch.flatten_batch(batch).items()}
    tensors |= {("constant", key): x for key, x in step.constants.items()}
    return step.graph, tensors


def split_and_compare(model: nn.Module, loss_fn: Loss, batch: Any, parts: int = 2) -> LogicalGraph:
    """The split graph, after its step has been compared with that of the whole batch."""
    torch.manual_seed(0)
    graph, inputs = captured(model, loss_fn, batch)
    split = verify(split_time(graph, parts))
    assert parse_graph(str(split)) == split
    whole, micro = run(graph, inputs), run(split, inputs)
    assert_same(micro.outputs, whole.outputs)
    assert_same(micro.updates, whole.updates)
    return split


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12, msg=key)


def barriers(graph: LogicalGraph) -> list[Call]:
    """Calls that make one value of all micro-batches, which a call in the loop waits for."""
    loop = loop_values(graph)
    waiting: dict[str, list[Call]] = {}
    found: list[Call] = []
    for node in graph.of_kind(Call):
        names = [value.name for value in node.outputs if value]
        causes = {id(c): c for use in node_uses(node) for c in waiting.get(use, ())}
        if node.op in ("weft.accumulate", "weft.pack"):
            waiting[names[0]] = [node]
        elif loop.intersection(names):
            found += causes.values()
        else:
            waiting |= {name: list(causes.values()) for name in names}
    return list({id(call): call for call in found}.values())


@pytest.mark.parametrize("parts", [2, 4])
def test_mlp(parts: int) -> None:
    split = split_and_compare(MLP(dropout=0.3), classification_loss, vector_batch(8), parts)
    assert barriers(split) == []
    assert cut_leaves(split) == {"x", "y"}
    assert [node.value.shape for node in split.of_kind(Input)][-2:] == [
        (parts, 8 // parts, 8),
        (parts, 8 // parts),
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_gpt(tied: bool) -> None:
    split = split_and_compare(GPT(dropout=0.1, tied=tied), token_loss, token_batch(4))
    assert barriers(split) == []
