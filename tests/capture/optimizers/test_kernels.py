"""The kernels of updates, and the memory that updates take while they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import models
from weft.capture import capture
from weft.capture.optimizers.attributes import kernels_of
from weft.capture.optimizers.trials import AliveBytes
from weft.ir.logical import Update
from weft.ir.nodes import UpdateBytes
from weft.ir.parse import parse_graph


class Foreign(torch.optim.SGD):
    """An optimizer of the user's own, which may overwrite gradients."""


def captured(optimizer: type[torch.optim.Optimizer], device: str, **options: Any) -> Any:
    model = models.MLP()
    made = optimizer(model.parameters(), **{"lr": 0.1, **options})  # type: ignore[call-arg]
    batch = models.vector_batch(dtype=torch.float32)
    return capture(model, models.classification_loss, made, batch, device, training=True).graph


@pytest.mark.parametrize(
    ("optimizer", "device", "options", "takes"),
    [
        (torch.optim.AdamW, "cpu", {}, (0, 0, 0)),
        (torch.optim.AdamW, "cpu", {"foreach": True}, (0, 0, 0)),
        # The root of the second moment, the quotient on its way; the next one's while this one's is there.
        (torch.optim.AdamW, "cpu", {"foreach": False}, (8, 4, 0)),
        (torch.optim.RMSprop, "cpu", {}, (4, 4, 0)),
        (torch.optim.RMSprop, "cpu", {"foreach": True}, (4, 4, 0)),
        # Fused kernels keep gradients; a foreign class may not.
        (Foreign, "cpu", {}, (0, 0, 4)),
    ],
)
def test_bytes_for_each_element(
    optimizer: type[torch.optim.Optimizer],
    device: str,
    options: dict[str, Any],
    takes: tuple[int, int, int],
) -> None:
    graph = captured(optimizer, device, **options)
    (update, *_) = graph.of_kind(Update)
    assert update.takes == UpdateBytes(*takes)
    assert parse_graph(str(graph)) == graph


@pytest.mark.parametrize(
    ("options", "device", "kernels"),
    [
        ({"fused": None, "foreach": None}, "cpu", "fused"),
        ({"fused": None, "foreach": None}, "cuda", "fused"),
        ({"fused": None, "foreach": True}, "cuda", "fused"),
        ({"fused": False, "foreach": None}, "cuda", "loop"),
        ({"fused": None, "foreach": False}, "cuda", "loop"),
        ({"foreach": None}, "cuda", "lists"),
        ({"foreach": None}, "cpu", "loop"),
        ({"foreach": True}, "cpu", "loop"),
        ({}, "cuda", "loop"),
    ],
)
def test_kernels(options: dict[str, Any], device: str, kernels: str) -> None:
    assert kernels_of(options, device, {torch.float32}) == kernels


def test_short_floats_run_in_a_loop_on_a_cpu() -> None:
    options = {"fused": None, "foreach": None}
    assert kernels_of(options, "cpu", {torch.float32, torch.bfloat16}) == "loop"
    assert kernels_of(options, "cuda", {torch.bfloat16}) == "fused"


def test_held_bytes_come_and_go() -> None:
    held = AliveBytes()
    a = torch.empty(4)
    held.note([a], [])
    held.note([a[:2]], [a])
    b = torch.empty(2)
    held.note([b], [a])
    assert (held.now, held.most) == (24, 24)
    del b
    assert (held.now, held.most) == (16, 24)
