"""A capture for other shapes, which knows the first one: the same graph, quicker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.capture import Captured, capture
from weft.capture.fx import retrace
from weft.capture.tracing import trace
from weft.errors import CaptureError

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Runs any function of itself and a batch [n, 8]."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("table", torch.ones(6, 8))
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def long_ones_twice(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on a shape."""
    return net.layer(net.layer(x)) if len(x) > 4 else net.layer(x)


FORWARDS: dict[str, Forward] = {
    "linear": lambda net, x: net.layer(x).relu(),
    "positions": lambda net, x: net.layer(x) + torch.arange(x.shape[0])[:, None],
    "as many rows as there are": lambda net, x: net.layer(x) + net.table[: len(x)],
    "constant": lambda net, x: net.layer(x) * torch.tensor(float(len(x))),
    "written in place": lambda net, x: net.layer(x).add_(1).relu_(),
    "batch norm": lambda net, x: net.norm(net.layer(x)),
    "dropout": lambda net, x: nn.functional.dropout(net.layer(x), 0.5),
    "recurrent": lambda net, x: net.lstm(x[None])[0],
    "checkpoint": lambda net, x: checkpoint(net.layer, x, use_reentrant=False),
    "several results": lambda net, x: sum(net.layer(x).split(1, 0)[:2]),  # type: ignore[return-value]
    "autocast": lambda net, x: under_autocast(net, x),
    "branches": long_ones_twice,
    "turned in place": lambda net, x: net.layer(x).mul(2).t_(),
}
# Those of which the second trace is left to `make_fx`.
TRACED = ("several results", "branches", "turned in place")


def under_autocast(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.layer(net.layer(x)).float()


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def captured(model: nn.Module, rows: int, like: Captured | None = None) -> Captured:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(model, loss_fn, optimizer, torch.ones(rows, 8), like=like)


@pytest.mark.parametrize("name", FORWARDS)
def test_the_graph_is_that_of_a_trace(name: str) -> None:
    model = Net(FORWARDS[name])
    first = captured(model, 6)
    found, expected = captured(model, 4, like=first), captured(model, 4)
    assert found.graph == expected.graph != first.graph
    assert [e.text for e in found.watch.entries] == [e.text for e in expected.watch.entries]
    for key, constant in expected.constants.items():
        assert torch.equal(found.constants[key], constant)


@pytest.mark.parametrize("name", FORWARDS)
def test_what_is_like_the_first_is_not_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = Net(FORWARDS[name]), []
    first = captured(model, 6)
    made = trace.trace  # type: ignore[attr-defined]

    def counted(*args: Any) -> torch.fx.GraphModule:
        calls.append(name)
        return made(*args)

    monkeypatch.setattr(trace, "trace", counted)
    captured(model, 4, like=first)
    assert len(calls) == (name in TRACED)


def test_an_op_that_make_fx_would_not_have_recorded_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where it keeps a tensor alive, and torch makes another one in its place."""
    model = Net(FORWARDS["positions"])
    first, expected = captured(model, 6), captured(model, 4)
    made = retrace._Light._made

    def keeping(self: Any, node: torch.fx.Node, result: Any) -> None:
        made(self, node, result)
        self.held = [*getattr(self, "held", []), result]

    monkeypatch.setattr(retrace._Light, "_made", keeping)
    assert captured(model, 4, like=first).graph == expected.graph


def test_errors_are_those_of_a_trace() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.layer(x) * (x.sum().item() if len(x) < 5 else 1)

    model = Net(forward)
    first = captured(model, 6)
    with pytest.raises(CaptureError, match="test_retrace.py"):
        captured(model, 4, like=first)


def test_other_rows_are_cut_by_numbers_of_the_new_shape() -> None:
    """Numbers of Python that are made of shapes are the new ones, though ops and operands are the same."""
    model = Net(lambda net, x: net.layer(x[: len(x) // 2]) * len(x))
    first = captured(model, 6)
    found = captured(model, 4, like=first)
    assert found.graph == captured(model, 4).graph
