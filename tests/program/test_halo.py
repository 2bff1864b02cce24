"""Images split along height and width: border rows travel, and training equals plain PyTorch's."""

from __future__ import annotations

import copy
import re
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import ResNet, classification_loss
from weft.compiler.signatures import graph_halos
from weft.ir.logical import Call
from weft.ir.plan import Communicate, Transfer
from weft.layout import Split, region_size
from weft.ops.windows import whole_frame
from weft.runtime.kernels.window_ops import convolution_backward

S, B = weft.split, weft.broadcast
STEPS = 3


class CNN(nn.Module):
    """Convolutions with strides and dilation, and both kinds of pooling: [n, 3, h, w] -> [n, classes].

    The images are so small that moving them is cheaper than many exchanges: hints keep them split.
    """

    def __init__(self, classes: int = 5, sbp: Any = None) -> None:
        super().__init__()
        self.sbp = sbp
        self.features = nn.Sequential(
            nn.Conv2d(3, 2, 3, padding=1),
            nn.BatchNorm2d(2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(2, 4, (5, 3), padding=(4, 1), dilation=(2, 1)),
            nn.Tanh(),
            nn.AvgPool2d(2, 1),
            nn.Conv2d(4, 2, 3, 2),
        )
        self.head = nn.Linear(2, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.features:
            x = layer(x)
            x = x if self.sbp is None else weft.hint(x, self.sbp)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def images(n: int, height: int, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 3, height, width, dtype=torch.float64, generator=generator)
    return {"x": x, "y": torch.randint(5, (n,), generator=generator)}


def train(model: nn.Module, batch: Any, grid: Any, split: Any) -> tuple[Any, Any, Any]:
    """Losses, the final state, and the program, when `split` lays out the images."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    placement = weft.placement("cpu", grid)
    with weft.local_world(len(placement.ranks)):
        program = weft.compile(
            model,
            classification_loss,
            optimizer,
            batch,
            placement=placement,
            strategy=weft.Strategy(batch={"x": split, "y": B}, parameters={"*": B}),
        )
        losses = [program.step(batch).item() for _ in range(STEPS)]
        return losses, program.full_state_dict(), program


def train_plain(model: nn.Module, batch: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = classification_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def sliding_calls(program: Any, dim: int) -> set[str]:
    """The ops of a program that run on windows along `dim`."""
    graph = program._core.compiled.graph
    return {
        node.op
        for node in graph.of_kind(Call)
        if ("convolution" in node.op or "pool" in node.op)
        and any(value and Split(dim) in value.layout.sbp for value in node.outputs)
    }


BACKWARD_TOO = {
    f"aten.{op}.default"
    for op in (
        "convolution",
        "convolution_backward",
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
        "avg_pool2d",
        "avg_pool2d_backward",
    )
}
CASES: dict[str, tuple[type[nn.Module], tuple[int, int, int], Any, Any]] = {
    "cnn, height, 2": (CNN, (1, 64, 8), [0, 1], S(2)),
    "cnn, height, 4, uneven": (CNN, (1, 91, 8), [0, 1, 2, 3], S(2)),
    "cnn, width, 2, uneven": (CNN, (1, 14, 151), [0, 1], S(3)),
    "cnn, batch and height": (CNN, (2, 90, 8), [[0, 1], [2, 3]], [S(0), S(2)]),
    "cnn, height and width": (CNN, (1, 66, 70), [[0, 1], [2, 3]], [S(2), S(3)]),
    "resnet, height, 2": (ResNet, (1, 48, 8), [0, 1], S(2)),
    "resnet, height, 4, uneven": (ResNet, (1, 511, 8), [0, 1, 2, 3], S(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_training_on_split_images_equals_plain_torch(name: str) -> None:
    make, shape, grid, split = CASES[name]
    torch.manual_seed(0)
    model, batch = make().double(), images(*shape)
    expected, state = train_plain(copy.deepcopy(model), batch)
    if isinstance(model, CNN):
        model.sbp = tuple(split) if isinstance(split, list) else split
    losses, found, program = train(model, batch, grid, split)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    for key, value in state.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=key)
    dims = [sbp.dim for sbp in (split if isinstance(split, list) else [split]) if sbp.dim > 1]
    for dim in dims:
        expected_ops = BACKWARD_TOO if make is CNN else {"aten.convolution.default"}
        assert sliding_calls(program, dim) >= expected_ops


@pytest.mark.one_process("it compares the plans of both ranks")
def test_explain_and_the_plan_show_the_halos() -> None:
    torch.manual_seed(0)
    _, _, program = train(CNN(sbp=S(2)).double(), images(1, 64, 8), [0, 1], S(2))
    compiled = program._core.compiled
    found = {halo.value.name: halo for halo, _ in graph_halos(compiled.graph)}
    # One border row of 3 channels and 8 float64 columns to each neighbour.
    assert found["x"].total == 2 * 3 * 8 * 8
    assert re.search(r"halo +384 B +float64\[1, 3, 64, 8\] +batch x", program.explain(details=True))
    transfers = [
        [
            node
            for actor in plan.actors
            if isinstance(actor, Communicate)
            for node in actor.collectives
            if isinstance(node, Transfer)
        ]
        for plan in compiled.plan.ranks
    ]
    assert len(transfers[0]) == len(transfers[1]) == sum(1 for _ in graph_halos(compiled.graph))
    for one, other in zip(*transfers, strict=True):
        sent = [
            region_size(region)
            for rank, node in enumerate((one, other))
            for peer, region in node.sends
            if peer != rank
        ]
        assert sum(sent) * 8 == one.bytes == other.bytes
    # The input of the first convolution is read again by its backward: fetched once.
    assert len({node.input.name for node in transfers[0] if node.input.name == "x"}) == 1
    assert [node.input.name for node in transfers[0]].count("x") == 1


def test_a_single_image_is_split_along_space_of_its_own_accord() -> None:
    torch.manual_seed(0)
    model, batch = nn.Conv2d(1, 1, 3, padding=1).double(), {"x": images(1, 64, 64)["x"][:, :1]}

    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).sum()

    with weft.local_world(2):
        program = weft.compile(
            model,
            run,
            None,
            batch,
            placement=weft.placement("cpu", [0, 1]),
            strategy=weft.Strategy(batch={"*": B}, parameters={"*": B}),
        )
        torch.testing.assert_close(program.step(batch), run(model, batch).detach())
    assert sliding_calls(program, 2) | sliding_calls(program, 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_beside_a_frozen_weight(rank: int) -> None:
    """Each rank has fewer rows than the kernel, and no window of the input, which only the weight's gradient needs."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 4, 6).double(), torch.randn(5, 3, 3, 3).double()
    grad, rows = torch.randn(2, 5, 4, 6).double(), slice(2 * rank, 2 * rank + 2)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, True])
    whole = torch.ops.aten.convolution_backward(grad, x, weight, [5], *settings)
    frame = whole_frame(4, 4, 3, 1, 1, 1).part(2, rank)
    frames = [astuple(frame), astuple(whole_frame(6, 6, 3, 1, 1, 1))]
    first, count = frame.returned
    window = grad[:, :, first : first + count]
    found = convolution_backward(window, x[:, :, rows], weight, [5], *settings, frames)
    torch.testing.assert_close(found[0], whole[0][:, :, rows])
    assert found[1] is None
    torch.testing.assert_close(found[2], grad[:, :, rows].sum((0, 2, 3)))
