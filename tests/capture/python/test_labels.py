"""Labels for profilers in a step are no part of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from weft.capture import capture


@record_function("all of it")
def labelled(model: nn.Module, batch: Tensor) -> Tensor:
    with record_function("forward"), torch.autograd.profiler.record_function("again", "args"):
        made = model(batch)
    return made.sum()


def plain(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


def test_the_graph_is_that_without_labels() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs = []
    for loss_fn in (labelled, plain):
        first = capture(model, loss_fn, optimizer, torch.ones(3, 4))
        later = capture(model, loss_fn, optimizer, torch.ones(2, 4), like=first)
        graphs.append(
            [[(n.op, n.args) for n in g.graph.nodes if hasattr(n, "op")] for g in (first, later)]
        )
    assert graphs[0] == graphs[1]
    with torch.profiler.profile() as profile, record_function("afterwards"):
        plain(model, torch.ones(3, 4))
    assert "afterwards" in {event.name for event in profile.events()}
