"""Sums of small products become one product; others stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weft
from contexts import NOTHING
from single_device import assert_same_training, compiled, plain_training
from weft.compiler.graph.joined_products import join_products
from weft.ir import parse_graph, verify
from weft.ir.logical import Call, LogicalGraph

GRAPH = """
graph "steps"
%a = parameter "a" : float32[{m}]
%w = parameter "w" : float32[{m}, 8]
%x1 = batch "x1" : float32[{k}, {m}]
%x2 = batch "x2" : float32[{k}, {m}]
%y1 = batch "y1" : float32[{k}, 8]
%y2 = batch "y2" : float32[{k}, 8]
%decay = call aten.mul.Tensor(%w, 0.5) : float32[{m}, 8]
%r2 = call aten.sum.dim_IntList(%x2, [0], True) : float32[1, {m}]
%v2 = call aten.view.default(%r2, [{m}]) : float32[{m}]
%r1 = call aten.sum.dim_IntList(%x1, [0], True) : float32[1, {m}]
%v1 = call aten.view.default(%r1, [{m}]) : float32[{m}]
%bias = call aten.add.Tensor(%v2, %v1) : float32[{m}]
%t1 = call aten.t.default(%x1) : float32[{m}, {k}]
%p1 = call aten.mm.default(%t1, %y1) : float32[{m}, 8]
%t2 = call aten.t.default(%x2) : float32[{m}, {k}]
%p2 = call aten.mm.default(%t2, %y2) : float32[{m}, 8]
%first = call aten.add.Tensor(%decay, %p2) : float32[{m}, 8]
%total = call aten.add.Tensor(%first, %p1) : float32[{m}, 8]
update "SGD" group 0 %w from %total
update "SGD" group 0 %a from %bias
"""


def ops(graph: LogicalGraph) -> list[str]:
    return [call.op.removeprefix("aten.").split(".")[0] for call in graph.of_kind(Call)]


def test_products_and_rows_are_joined() -> None:
    graph = verify(join_products(verify(parse_graph(GRAPH.format(k=2, m=8))), NOTHING))
    assert ops(graph) == ["mul", "stack", "view", "sum", "view", "stack", "view", "t", "mm", "add"]
    calls = {call.outputs[0].name: call for call in graph.of_kind(Call)}  # type: ignore[union-attr]
    xs, ys = (call.args[0] for call in graph.of_kind(Call) if call.op == "aten.stack.default")
    # Pairs stay pairs, in the order of the graph.
    assert [ref.name for ref in xs] == ["x1", "x2"]  # type: ignore[union-attr]
    assert [ref.name for ref in ys] == ["y1", "y2"]  # type: ignore[union-attr]
    assert calls["total"].op == "aten.add.Tensor"
    assert calls["bias"].op == "aten.view.default"


def test_large_products_stay() -> None:
    """Of 64 rows and 8 columns, stacking would move more than it saves."""
    text = GRAPH.format(k=64, m=8)
    assert join_products(parse_graph(text), NOTHING) == parse_graph(text)


def test_a_product_that_is_read_again_stays() -> None:
    text = GRAPH.format(k=2, m=8) + 'output "p1" %p1\n'
    assert join_products(parse_graph(text), NOTHING) == parse_graph(text)


def test_a_transposed_matrix_that_is_read_again_stays() -> None:
    text = GRAPH.format(k=2, m=8) + 'output "t1" %t1\n'
    graph = verify(join_products(verify(parse_graph(text)), NOTHING))
    assert ops(graph).count("mm") == 1
    assert "t1" in graph.producers


def test_a_value_that_is_added_to_itself_counts_twice() -> None:
    text = GRAPH.format(k=2, m=8).replace("%decay, %p2)", "%p2, %p2)")
    assert join_products(parse_graph(text), NOTHING) == parse_graph(text)


class Recurrent(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(20, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.lstm(self.token(tokens))
        state, states = x.new_zeros(len(x), self.cell.hidden_size), []
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
            states.append(state)
        return self.head(torch.stack(states, 1))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (3, weft.data_parallel()),
        (2, weft.Strategy(batch={"*": weft.split(0)}, micro_batches=2, zero=weft.Zero(2))),
    ],
)
def test_recurrent_models_train_alike(ranks: int, strategy: weft.Strategy) -> None:
    torch.manual_seed(0)
    model = Recurrent()
    batches = [{name: torch.randint(20, (4, 3)) for name in "xy"} for _ in range(3)]
    expected = plain_training(model, loss_fn, batches)
    with compiled(model, loss_fn, batches[0], list(range(ranks)), strategy) as program:
        stacked = [call for call in program.graph.of_kind(Call) if "steps" in str(call.outputs[0])]
        assert stacked
        assert_same_training(program, batches, expected)
