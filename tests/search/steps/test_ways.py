"""Ways of gradients: the widest counts, each tensor is on one way only, and what is frozen is on none."""

from __future__ import annotations

import torch
from torch import nn

import weft
from search.jobs import dense, loss
from weft.ir.logical import LogicalGraph
from weft.search.steps.exchanged import GradientPaths, trained
from weft.search.steps.linears import forward

WIDTH, ROWS = 16, 64


def graph_of(model: nn.Module) -> LogicalGraph:
    batch = {"x": torch.zeros(ROWS, WIDTH), "y": torch.zeros(ROWS, dtype=torch.int64)}
    own = [each for each in model.parameters() if each.requires_grad]
    return weft.Job(model, loss, torch.optim.SGD(own), batch).stored().graph


def ways(graph: LogicalGraph) -> tuple[GradientPaths, str]:
    """The ways of a step whose layers are all whole, and what its last layer reads."""
    found, last = GradientPaths(graph), ""
    for call in forward(graph):
        found.over(call, None, stops=False)
        reads = [name for name in call.uses if graph.values[name].shape == (ROWS, WIDTH)]
        last = reads[0] if call.op == "aten.addmm.default" and reads else last
    return found, last


def test_a_way_ends_at_a_trained_parameter_and_is_as_wide_as_its_smallest_tensor() -> None:
    graph = graph_of(dense(WIDTH, WIDTH, 4))
    found, last = ways(graph)
    way = found.widest(last)
    assert way is not None
    # The weight is smaller than what the layer makes.
    assert way.size == 4 * WIDTH * WIDTH < graph.values[last].nbytes
    assert way.weights > way.size


def test_a_tensor_is_on_one_way_only() -> None:
    found, last = ways(graph_of(dense(WIDTH, WIDTH, 4)))
    assert found.widest(last) is not None
    assert found.widest(last) is None


def test_nothing_goes_back_into_what_is_frozen() -> None:
    model = dense(WIDTH, WIDTH, 4)
    model[0].requires_grad_(False)
    graph = graph_of(model)
    found, last = ways(graph)
    assert {each.key for each in trained(graph)} == {"2.weight", "2.bias"}
    assert not found.lead_to(last)
    assert found.widest(last) is None
