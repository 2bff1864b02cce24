"""Nodes point at the user's lines and modules, forward and backward."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft.capture import capture
from weft.capture.fx.locations import TRACE_FILE
from weft.capture.tracing import trace
from weft.errors import CaptureError, StrategyError
from weft.ir.logical import Call


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.fc(x))
        return y + x.exp()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Inner(), Inner())

    def forward(self, x: torch.Tensor) -> Any:
        return self.blocks(x).sigmoid()


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch), torch.zeros_like(batch))


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    model = Outer()
    optimizer = torch.optim.SGD(model.parameters())
    found: list[Call] = capture(model, loss_fn, optimizer, torch.ones(4, 8)).graph.of_kind(Call)
    return found


def line_of(thing: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(thing)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("op", "thing", "text", "module", "backward"),
    [
        ("aten.tanh.default", Inner, "tanh", "blocks.1", False),
        ("aten.addmm.default", Inner, "self.fc(x)", "blocks.1.fc", False),
        ("aten.sigmoid.default", Outer, "sigmoid", "", False),
        ("aten.mse_loss.default", loss_fn, "mse_loss", "", False),
        ("aten.mse_loss_backward.default", loss_fn, "mse_loss", "", True),
        ("aten.sigmoid_backward.default", Outer, "sigmoid", "", True),
        ("aten.tanh_backward.default", Inner, "tanh", "blocks.0", True),
        ("aten.mm.default", Inner, "self.fc(x)", "blocks.0.fc", True),
    ],
)
def test_last_call_of_each_op(
    calls: list[Call], op: str, thing: Any, text: str, module: str, backward: bool
) -> None:
    location = [call for call in calls if call.op == op][-1].location
    assert location is not None
    assert location.file == __file__
    assert location.line == line_of(thing, text)
    assert (location.module, location.backward) == (module, backward)


def test_every_call_has_a_location(calls: list[Call]) -> None:
    assert [call for call in calls if call.location is None] == []


def test_sums_of_gradients_belong_to_the_backward(calls: list[Call]) -> None:
    backward = [call for call in calls if call.location and call.location.backward]
    assert any(call.op == "aten.add.Tensor" for call in backward)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * gradient.sum().item()


def test_a_step_that_raises_leaves_no_notes_behind() -> None:
    def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return FailsInBackward.apply(model(batch)).sum()

    model, batch = torch.nn.Linear(3, 2), torch.zeros(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError):
        capture(model, failing, optimizer, batch)
    gc.collect()
    assert "custom" not in torch.fx.traceback.current_meta
    captured = capture(model, lambda m, b: m(b).sum(), optimizer, batch)
    calls = captured.graph.of_kind(Call)
    assert [call for call in calls if call.location is None] == []
    assert not calls[0].location.backward


class Staged(nn.Module):
    """Stage 1 runs inside of a module, a nested stage 2 in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        with weft.stage(1):
            x = self.second(x)
            with weft.stage(2):
                x = x.sigmoid()
            return x.exp()


def test_stages_in_the_code_reach_forward_and_backward() -> None:
    model = Staged()
    batch = {"x": torch.ones(2, 4)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(model, lambda m, b: m(b["x"]).sum(), optimizer, batch).graph
    found = {
        (node.op, node.phase.kind, node.location.stage)
        for node in graph.of_kind(Call)
        if node.location and node.op.split(".")[1] in ("tanh", "addmm", "sigmoid", "exp", "sum")
    }
    assert {(op, stage) for op, kind, stage in found if kind == "forward"} == {
        ("aten.addmm.default", None),
        ("aten.tanh.default", None),
        ("aten.addmm.default", 1),
        ("aten.sigmoid.default", 2),
        ("aten.exp.default", 1),
        ("aten.sum.default", None),
    }
    backward = [node for node in graph.of_kind(Call) if node.phase.kind == "backward"]
    stages = {node.op: node.location.stage for node in backward if node.location}
    assert (stages["aten.sigmoid_backward.default"], stages["aten.tanh_backward.default"]) == (
        2,
        None,
    )


def test_backward_calls_know_the_forward_calls_that_they_belong_to() -> None:
    """One line that runs twice: only the sequence tells the two apart."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"] * model.weight
        for _ in range(2):
            x = x.tanh()
        return x.sum()

    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(model, loss, optimizer, {"x": torch.ones(4, 4)}).graph
    forward = [node for node in graph.of_kind(Call) if node.op == "aten.tanh.default"]
    backward = [node for node in graph.of_kind(Call) if node.op == "aten.tanh_backward.default"]
    sequences = [node.autograd for node in forward]
    assert None not in sequences
    assert len(set(sequences)) == 2
    assert [node.autograd for node in backward] == sequences[::-1]


def test_the_frame_that_calls_the_users_function_is_known_by_its_file() -> None:
    """Frames around it are not the user's: those of who captures must not stand for a line of the step."""
    assert inspect.getsourcefile(trace) == TRACE_FILE


def test_a_stage_outside_of_a_capture_does_nothing() -> None:
    with weft.stage(3):
        pass
    with pytest.raises(StrategyError, match="number of a stage, from 0, got -1"):
        weft.stage(-1)
