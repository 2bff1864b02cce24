"""A step in micro-batches makes what the step of the whole batch makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compiler import micro_models as micro
from contexts import asked
from interpreter import run
from models import (
    GPT,
    MLP,
    ResNet,
    classification_loss,
    image_batch,
    token_batch,
    token_loss,
    vector_batch,
)
from weft.capture import capture
from weft.compiler.microbatch.facts import cut_leaves
from weft.compiler.microbatch.split import split_time
from weft.errors import StrategyError
from weft.ir import parse_graph, verify
from weft.ir.logical import Call, Input, LogicalGraph, Update
from weft.ir.nodes import Phase
from weft.program.inspect.tables import barriers

pytestmark = pytest.mark.usefixtures("double_precision")


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
    split = verify(split_time(graph, asked(micro_batches=parts)))
    assert parse_graph(str(split)) == split
    whole, micro = run(graph, inputs), run(split, inputs)
    assert_same(micro.outputs, whole.outputs)
    assert_same(micro.updates, whole.updates)
    return split


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12, msg=key)


@pytest.mark.parametrize("parts", [2, 4])
def test_mlp(parts: int) -> None:
    split = split_and_compare(MLP(dropout=0.3), classification_loss, vector_batch(8), parts)
    assert barriers(split) == ()
    assert cut_leaves(split) == {"x", "y"}
    assert [node.value.shape for node in split.of_kind(Input)][-2:] == [
        (parts, 8 // parts, 8),
        (parts, 8 // parts),
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_gpt(tied: bool) -> None:
    split = split_and_compare(GPT(dropout=0.1, tied=tied), token_loss, token_batch(4))
    assert barriers(split) == ()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], Any], int]] = {
    # name: model, loss, batch, number of barriers
    "ignored labels": (MLP, micro.ignoring, micro.labels_with_holes, 0),
    "weighted classes": (micro.Weighted, micro.own_loss, vector_batch, 0),
    "smoothed labels": (MLP, micro.smoothed, vector_batch, 0),
    "a mask of the batch": (MLP, micro.masked_mean, micro.labels_with_holes, 0),
    "a count of the model's": (MLP, micro.confident, vector_batch, 1),
    "contrastive": (MLP, micro.contrastive, vector_batch, 3),
    "the hardest samples": (MLP, micro.hardest, vector_batch, 1),
    "statistics of the batch": (MLP, micro.spread, vector_batch, 6),
    "the size of the batch": (MLP, micro.by_size, vector_batch, 0),
    "a penalty": (MLP, micro.penalized, vector_batch, 0),
    "gated experts": (micro.Gated, micro.own_loss, vector_batch, 1),
    "lstm": (micro.Recurrent, classification_loss, micro.sequences, 0),
    "time merged with the batch": (micro.Merged, micro.own_loss, micro.sequences, 1),
    "noise": (micro.Noisy, micro.own_loss, vector_batch, 0),
    "patches": (micro.Patches, classification_loss, image_batch, 0),
    "leaves of other sizes": (MLP, micro.with_mask, micro.masked_batch, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_loss_may_look_at(case: str) -> None:
    make_model, loss_fn, make_batch, count = CASES[case]
    torch.manual_seed(0)
    split = split_and_compare(make_model(), loss_fn, make_batch())
    assert len(barriers(split)) == count


def accumulated(model: nn.Module, loss_fn: Loss, batch: Any, parts: int) -> tuple[Any, Any, Any]:
    """The loss, gradients and buffers of plain PyTorch, one micro-batch after the other."""
    model = copy.deepcopy(model)
    loss = 0.0
    for part in range(parts):
        own = {key: x.chunk(parts)[part] for key, x in batch.items()}
        weighted = loss_fn(model, own) / parts
        weighted.backward()
        loss = loss + weighted.detach()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss, gradients, dict(model.named_buffers())


@pytest.mark.parametrize("parts", [2, 4])
def test_batch_norm_sees_micro_batches(parts: int) -> None:
    torch.manual_seed(0)
    model, batch = ResNet(), image_batch(8)
    graph, inputs = captured(model, classification_loss, batch)
    split = verify(split_time(graph, asked(micro_batches=parts)))
    loss, gradients, buffers = accumulated(model, classification_loss, batch, parts)
    found = run(split, inputs)
    assert_same(found.outputs, {"loss": loss})
    assert_same({key: found.updates[key] for key in buffers}, buffers)
    assert_same({key: found.updates[key] for key in gradients}, gradients)
    assert barriers(split) == ()


def test_batch_norm_of_what_is_no_sample_sees_the_whole_batch() -> None:
    """Class means, a sum over samples for each class, are no samples themselves."""

    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        means = F.one_hot(batch["y"], 4).to(batch["x"].dtype).t() @ model.head(batch["x"])
        return (model.norm(means) ** 3).sum() + model.head(batch["x"]).mean()

    torch.manual_seed(0)
    split_and_compare(Prototypes(), loss_fn, vector_batch(8))


def test_other_buffers_have_one_version_a_step() -> None:
    """A mean that the user follows is that of the whole batch, also behind a BatchNorm."""

    class Following(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)
            self.register_buffer("center", torch.zeros(4))
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.norm(x))
            self.center.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
            self.steps.add_(1)
            return out

    torch.manual_seed(0)
    model, batch = Following(), vector_batch(8)
    graph, inputs = captured(model, classification_loss, batch)
    split = verify(split_time(graph, asked(micro_batches=2)))
    found = run(split, inputs).updates
    outs = []
    for part in batch["x"].chunk(2):
        model.center.zero_()
        outs.append(model(part).detach())
    assert_same({"center": found["center"]}, {"center": torch.cat(outs).mean(0) * 0.1})
    assert found["steps"] == 1
    assert found["norm.num_batches_tracked"] == 2


def test_gradients_are_accumulated_before_they_cross_stages() -> None:
    """Both uses of a tied table make a gradient: each stage adds up its own, and sends one."""
    graph, inputs = captured(GPT(tied=True), token_loss, token_batch(4))
    nodes = tuple(
        replace(node, phase=Phase(int(_late(node)), node.phase.kind))
        if isinstance(node, Call)
        else node
        for node in graph.nodes
    )
    staged = replace(graph, nodes=nodes)
    split = verify(split_time(staged, asked(micro_batches=2)))
    assert_same(run(split, inputs).updates, run(graph, inputs).updates)
    source = next(u.source.name for u in split.of_kind(Update) if u.target.name == "tokens.weight")
    add = split.producers[source]
    assert add.op == "aten.add.Tensor"
    makers = [split.producers[name] for name in add.uses]
    assert [(maker.op, maker.phase.stage) for maker in makers] == [
        ("weft.accumulate", 1),
        ("weft.accumulate", 0),
    ]


def _late(node: Call) -> bool:
    module = node.location.module if node.location else ""
    return not module.startswith(("tokens", "positions", "blocks", "dropout"))


@pytest.mark.parametrize(
    ("batch", "parts", "message"),
    [
        (
            vector_batch(6),
            4,
            "6 samples cannot be divided into micro_batches=4: .* 'x' has shape \\[6, 8\\].*drop_last",
        ),
        ({"x": torch.tensor(1.0), "y": torch.tensor(1.0)}, 2, "none of them has a dimension"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, parts: int, message: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return (model.hidden.weight * batch["x"].sum()).sum() + batch["y"].sum()

    graph, _ = captured(MLP(), loss_fn, batch)
    with pytest.raises(StrategyError, match=message):
        split_time(graph, asked(micro_batches=parts))


def test_batch_norm_needs_more_than_one_value() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    graph, _ = captured(model, classification_loss, vector_batch(4))
    with pytest.raises(StrategyError, match="1 value for each channel of a micro-batch"):
        split_time(graph, asked(micro_batches=4))


def test_a_gradient_through_batch_norm_is_not_differentiated_again() -> None:
    """Its sums over samples would be those of all micro-batches, whose statistics differ."""
    graph, _ = captured(_normed(), _penalized, vector_batch(8))
    with pytest.raises(StrategyError, match="the gradient of a BatchNorm is differentiated again"):
        split_time(graph, asked(micro_batches=2))


def test_half_precision_casts_what_batch_norm_saves() -> None:
    model = _normed().to(torch.bfloat16)
    model[1].float()
    graph, _ = captured(model, _halves, vector_batch(8))
    split_time(graph, asked(micro_batches=2))


def _normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def _halves(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"].to(torch.bfloat16)).square().mean()


def _penalized(model: nn.Module, batch: Any) -> Any:
    x = batch["x"].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum()


def test_counts_of_labels_gather_no_labels() -> None:
    """What is summed over a leaf keeps the leaf's shape, so that its parts may stay on their ranks."""
    graph, _ = captured(MLP(), micro.ignoring, micro.labels_with_holes())
    split = split_time(graph, asked(micro_batches=2))
    (count,) = (c for c in split.of_kind(Call) if c.op == "aten.sum.default")
    (counted,) = count.uses
    assert split.values[counted].shape == (2, 4)
    assert counted not in split.loop


def test_one_micro_batch_changes_nothing() -> None:
    graph, _ = captured(MLP(), classification_loss, vector_batch(4))
    assert split_time(graph, asked(micro_batches=1)) is graph
