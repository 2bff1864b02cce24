"""A cross-entropy split by classes: ignored and foreign targets, images of scores, weights, two axes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import weft
from weft.ir.logical import Box
from weft.runtime.kernels import loss_ops as class_ops
from weft.runtime.kernels.local_ops import LOCAL_OPS

CLASSES = 301


class Head(nn.Module):
    """Scores of the classes: [n, 6] -> [n, classes], or [n, 6, 2, 2] -> [n, classes, 2, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 6, dtype=torch.float64))
        self.register_buffer("weights", torch.rand(CLASSES, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensordot(x, self.weight, dims=([1], [1])).movedim(-1, 1)


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    scores = model(batch["x"])
    return functional.cross_entropy(scores, batch["y"], model.weights, reduction="sum")


def smoothed(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.1)


def each(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * losses).sum()


def batch_of(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (shape[0], *shape[2:]), generator=generator)
    y.view(-1)[1] = -100
    return {"x": x, "y": y}


def assert_same_step(
    program: weft.Program, model: Head, batch: Any, loss: Any, optimizer: torch.optim.Optimizer
) -> None:
    """One step of the program, then of plain PyTorch: the same loss and weight."""
    found = program.step(batch).item()
    state = program.full_state_dict()
    program.close()
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    assert found == pytest.approx(value.item(), rel=1e-12)
    assert torch.allclose(state["weight"], model.weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("grid", [[0, 1], [[0, 1], [2, 3]]], ids=["line", "grid"])
@pytest.mark.parametrize("shape", [(64, 6), (16, 6, 2, 2)], ids=["vectors", "images"])
@pytest.mark.parametrize("loss", [mean, weighted, smoothed, each])
def test_steps_equal_plain_pytorch(loss: Any, shape: Any, grid: Any) -> None:
    torch.manual_seed(0)
    model, batch = Head(), batch_of(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain, other = copy.deepcopy((model, optimizer))
    with weft.local_world(torch.tensor(grid).numel()):
        program = weft.compile(
            model,
            loss,
            optimizer,
            batch,
            placement=weft.placement("cpu", grid),
            # On the grid the classes are split twice.
            strategy=weft.Strategy(
                batch={"*": weft.broadcast}, parameters={"weight*": weft.split(0)}
            ),
        )
        assert_same_step(program, plain, batch, loss, other)
    gathered = [
        node
        for node in program.graph.of_kind(Box)
        if CLASSES in node.output.shape[1:2] and weft.broadcast in node.output.layout.sbp
    ]
    assert gathered == []
    # Without weights and other readers of the log-probabilities, none of these are made.
    alone = loss in (mean, each) and len(shape) == 2
    assert ("weft.class_loss_backward" in str(program.plan)) == alone
    assert ("weft.nll_loss_shard" in str(program.plan)) != alone


@pytest.mark.parametrize("loss", [mean, each])
def test_rows_and_classes_split(loss: Any) -> None:
    torch.manual_seed(0)
    model, batch = Head(), batch_of((64, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain, other = copy.deepcopy((model, optimizer))
    with weft.local_world(4):
        program = weft.compile(
            model,
            loss,
            optimizer,
            batch,
            placement=weft.placement("cpu", [[0, 1], [2, 3]]),
            strategy=weft.Strategy(
                batch={"*": (weft.split(0), weft.broadcast)},
                parameters={"weight*": (weft.broadcast, weft.split(0))},
                micro_batches=2,
            ),
        )
        assert_same_step(program, plain, batch, loss, other)
    assert "weft.class_loss_backward" in str(program.plan)


def again(model: nn.Module, batch: Any) -> torch.Tensor:
    """Reads the logits once more."""
    scores = model(batch["x"])
    return functional.cross_entropy(scores, batch["y"]) + (scores * scores).mean()


@pytest.mark.parametrize("loss", [mean, again])
def test_logits_that_nothing_else_reads_lie_by_columns(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strides = []
    gradient = class_ops.class_loss_backward

    def watched(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        strides.append(x.stride())
        return gradient(grad, x, *rest)

    monkeypatch.setattr(class_ops, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(class_ops, "_MANY_COLUMNS", CLASSES // 2)
    monkeypatch.setitem(LOCAL_OPS, "weft.class_loss_backward", watched)
    torch.manual_seed(0)
    model, batch = nn.Linear(6, CLASSES, bias=False), batch_of((64, 6))
    batch["x"] = batch["x"].float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain, other = copy.deepcopy((model, optimizer))
    with weft.local_world(2):
        program = weft.compile(
            model,
            loss,
            optimizer,
            batch,
            placement=weft.placement("cpu", range(2)),
            strategy=weft.Strategy(batch={"*": weft.broadcast}, parameters={"*": weft.split(0)}),
        )
        found = program.step(batch).item()
        state = program.full_state_dict()
        program.close()
    value = loss(plain, batch)
    value.backward()
    other.step()
    assert found == pytest.approx(value.item(), rel=1e-6)
    torch.testing.assert_close(state["weight"], plain.weight.detach())
    by_columns = {stride[0] == 1 for stride in strides}
    assert by_columns == {loss is mean}
