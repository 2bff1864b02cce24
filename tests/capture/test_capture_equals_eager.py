"""The captured step computes what plain PyTorch computes: loss, outputs, gradients, buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import reference
from weft.capture import capture

LossFunction = Callable[[nn.Module, Any], Any]


def check_step(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    uniform: Callable[..., Any] = reference.draw,
    tolerance: float = 1e-12,
) -> Any:
    """Capture, run the graph, and compare with one eager step of a copy of the model."""
    captured = capture(
        model, loss_fn, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]), batch
    )
    result = reference.run_graph(
        captured.graph, reference.model_inputs(model, captured, batch), uniform
    )
    eager = copy.deepcopy(model)
    returned = loss_fn(eager, batch)
    loss = returned
    if isinstance(returned, dict):
        loss = returned["loss"]
    elif isinstance(returned, tuple):
        loss = returned[0]
    loss.backward()
    close(result.outputs["loss"], loss, tolerance)
    expected = {k: p.grad for k, p in eager.named_parameters() if p.grad is not None}
    assert set(result.gradients) == set(expected)
    for name, gradient in expected.items():
        close(result.gradients[name], gradient, tolerance)
    for name, buffer in eager.named_buffers():
        before = dict(model.named_buffers())[name]
        close(result.buffers.get(name, before), buffer, tolerance)
    return captured


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_mlp() -> None:
    check_step(models.MLP().double(), models.classification_loss, models.vector_batch())


@pytest.mark.parametrize("tied", [False, True])
def test_gpt(tied: bool) -> None:
    model = models.GPT(tied=tied).double()
    captured = check_step(model, models.token_loss, models.token_batch())
    names = [x.key for x in captured.graph.nodes if getattr(x, "role", "") == "parameter"]
    assert names == [name for name, _ in model.named_parameters()]


def test_resnet_with_batch_norm() -> None:
    captured = check_step(
        models.ResNet().double(), models.classification_loss, models.image_batch(), tolerance=1e-11
    )
    calls = [node.op for node in captured.graph.nodes if "batch_norm" in getattr(node, "op", "")]
    assert len(calls) == 2 * sum(isinstance(x, nn.BatchNorm2d) for x in models.ResNet().modules())


def test_float32_resnet_agrees_with_torch() -> None:
    batch = models.image_batch(dtype=torch.float32)
    check_step(models.ResNet(), models.classification_loss, batch, tolerance=1e-4)


def test_batch_norm_in_evaluation_mode_within_training() -> None:
    model = models.ResNet().double()
    model.norm.eval()
    check_step(model, models.classification_loss, models.image_batch(), tolerance=1e-11)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(8, affine=False),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.SyncBatchNorm(8).eval(),
    ],
    ids=["plain", "no running", "sync in evaluation"],
)
def test_kinds_of_batch_norm(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 4)).double()
    check_step(model, models.classification_loss, models.vector_batch(), tolerance=1e-11)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_their_dropout(layer: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Drops with a chance of nothing: eager and captured keep every value, but must draw.
            self.layer = layer(8, 6, num_layers=2, dropout=1e-300, batch_first=True)
            self.head = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.layer(x)[0][:, -1])

    batch = {"x": torch.randn(4, 3, 8).double(), "y": torch.tensor([0, 1, 2, 3])}
    captured = check_step(Recurrent().double(), models.classification_loss, batch)
    assert str(captured.graph).count("weft.uniform") == 1


def test_dropout_masks_what_uniform_says() -> None:
    model = models.MLP(dropout=0.25).double()
    batch = models.vector_batch()

    def by_hand(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = F.relu(model.hidden(batch["x"]))
        drawn = reference.draw([8, 16], [0, 0], [8, 16], 0, dtype=torch.float64)
        return F.cross_entropy(model.head(hidden * (drawn < 0.75) / 0.75), batch["y"])

    captured = capture(model, models.classification_loss, None, batch)
    found = reference.run_graph(captured.graph, reference.model_inputs(model, captured, batch))
    close(found.outputs["loss"], by_hand(model, batch), 1e-12)


def test_gpt_with_dropout_draws_for_every_mask() -> None:
    model = models.GPT(layers=2, dropout=1e-300).double()
    captured = check_step(model, models.token_loss, models.token_batch(), reference.zeros)
    draws = [node for node in captured.graph.nodes if getattr(node, "op", "") == "weft.uniform"]
    assert [node.args[3] for node in draws] == list(range(1 + 2 * 3))


def ignoring(model: nn.Module, batch: Any) -> torch.Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0, 0.25]).double()
    return F.cross_entropy(model(batch["x"]), batch["y"], weight, ignore_index=2)


def smoothed(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=1, label_smoothing=0.1)


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), F.one_hot(batch["y"], 4).double())


def huber(model: nn.Module, batch: Any) -> torch.Tensor:
    target = F.one_hot(batch["y"], 4).double()
    out = model(batch["x"])
    return F.smooth_l1_loss(out, target) + F.huber_loss(out, target, reduction="sum", delta=0.3)


def binary(model: nn.Module, batch: Any) -> torch.Tensor:
    target = F.one_hot(batch["y"], 4).double()
    out = model(batch["x"])
    weight = torch.full((4,), 0.7).double()
    return F.binary_cross_entropy_with_logits(
        out, target, pos_weight=weight
    ) + F.binary_cross_entropy(out.sigmoid(), target)


def spread(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch["x"])
    variance, mean = torch.var_mean(out, dim=0)
    return (
        out.var(dim=1, unbiased=False).mean()
        + out.std()
        + variance.sum() * mean.mean()
        + torch.std_mean(out, dim=(0, 1), correction=2)[0]
    )


def divergence(model: nn.Module, batch: Any) -> torch.Tensor:
    target = F.softmax(batch["x"][:, :4], 1)
    return F.kl_div(F.log_softmax(model(batch["x"]), 1), target, reduction="batchmean")


@pytest.mark.parametrize(
    "loss_fn", [ignoring, smoothed, squared, huber, binary, spread, divergence]
)
def test_losses(loss_fn: LossFunction) -> None:
    captured = check_step(models.MLP().double(), loss_fn, models.vector_batch())
    assert "aten.mean" not in str(captured.graph)


def test_loss_of_images() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=0)

    batch = {"x": torch.randn(2, 3, 5, 5).double(), "y": torch.randint(4, (2, 5, 5))}
    check_step(nn.Conv2d(3, 4, 3, padding=1).double(), loss_fn, batch)


def test_frozen_and_unused_parameters_are_not_updated() -> None:
    model = models.MLP().double()
    model.hidden.weight.requires_grad_(False)
    model.spare = nn.Linear(3, 3).double()
    captured = check_step(model, models.classification_loss, models.vector_batch())
    keys = [x.key for x in captured.graph.nodes if getattr(x, "role", "") == "parameter"]
    assert "hidden.weight" in keys
    assert "spare.weight" in keys


def test_gradient_penalty_in_the_loss() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch["y"]) + slope.square().mean()

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    check_step(model, loss_fn, models.vector_batch())


def test_writes_in_place_become_values() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> Any:
            self.seen[2:5] += x.detach().sum(0)[2:5]
            y = self.linear(x)
            y[:, 1].mul_(2)
            return y.relu_()

    check_step(Counting().double(), models.classification_loss, models.vector_batch())


def test_values_in_place_of_writes_lie_in_any_order() -> None:
    """The gradient of what is written comes transposed, and goes on to a product of flattened rows."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.conv = nn.Conv1d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.linear(x.view(-1, 2, 4)) * 1.0
            y[:, 0] = y[:, 0] * 0.5
            y = nn.functional.pad(y.transpose(1, 2), (2, 0))
            return self.conv(y).transpose(1, 2).sum(1)

    check_step(Written().double(), models.classification_loss, models.vector_batch())


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid")
@pytest.mark.parametrize("size", [(4, 2, 1, 3), (4, 2, 3, 1, 2), (4, 2, 2, 3)])
@pytest.mark.parametrize("align_corners", [False, True])
def test_affine_grids_of_any_size(size: tuple[int, ...], align_corners: bool) -> None:
    dims = len(size) - 2
    batch = {"x": torch.randn(4, 8).double(), "image": torch.randn(size).double()}

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        theta = model(batch["x"]).view(4, dims, dims + 1)
        grid = F.affine_grid(theta, list(size), align_corners=align_corners)
        return F.grid_sample(batch["image"], grid, align_corners=align_corners).square().sum()

    check_step(nn.Linear(8, dims * (dims + 1)).double(), loss_fn, batch)


def test_derivatives_of_forward_mode() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"]
        _, slope = torch.func.jvp(lambda v: torch.tanh(model(v)), (x,), (torch.ones_like(x),))
        return slope.square().mean()

    check_step(nn.Linear(8, 4).double(), loss_fn, models.vector_batch())
