"""LSTMs whose layers are one op each train as on one device; those whose weights are split too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import weft
from single_device import assert_same_state, assert_same_training, compiled, plain_training
from weft.errors import InternalError
from weft.ir import parse_graph, verify
from weft.ir.logical import Call

S, B = weft.split, weft.broadcast
DATA = weft.data_parallel()


class Tagger(nn.Module):
    """Tokens [n, time] -> logits [n, time, 12], from trained first states or none."""

    def __init__(self, started: bool = False, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.first = options.setdefault("batch_first", True)
        self.token = nn.Embedding(12, 8)
        self.lstm = nn.LSTM(8, 6, 2, dropout=dropout, **options)
        directions = 1 + self.lstm.bidirectional
        self.head = nn.Linear(6 * directions, 12)
        shape = (2, 2 * directions, 1, 6)
        self.start = nn.Parameter(torch.randn(shape)) if started else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens if self.first else tokens.t())
        if self.start is None:
            out, (_, cell) = self.lstm(x)
        else:
            state = self.start.expand(-1, -1, len(tokens), -1)
            out, (_, cell) = self.lstm(x, (state[0].contiguous(), state[1].contiguous()))
        out = out if self.first else out.transpose(0, 1)
        return self.head(out) + cell.sum(0).mean(1)[:, None, None]


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def batches(count: int = 2, n: int = 8) -> list[dict[str, Tensor]]:
    return [{name: torch.randint(12, (n, 3)) for name in "xy"} for _ in range(count)]


def layers(program: weft.Program) -> int:
    return sum(call.op == "weft.lstm" for call in program.graph.of_kind(Call))


CASES: dict[str, tuple[dict[str, Any], Any, weft.Strategy]] = {
    "data parallel": ({}, [0, 1], DATA),
    "more ranks than samples": ({"started": True}, [0, 1, 2], DATA),
    "time first, no biases": ({"batch_first": False, "bias": False}, [0, 1], DATA),
    "both directions, first states": (
        {"bidirectional": True, "started": True},
        [0, 1],
        replace(DATA, micro_batches=2, zero=weft.Zero(3), clip_norm=0.1),
    ),
    "first states, recomputed": (
        {"started": True},
        [0, 1],
        replace(DATA, recompute=["lstm"], offload=["token"]),
    ),
    "pipeline": ({"bidirectional": True}, [[0], [1]], replace(DATA, stages=2, micro_batches=4)),
    "others split": ({}, [0, 1], weft.Strategy(batch={"*": B}, parameters={"head.*": S(0)})),
    "both axes": (
        {},
        [[0, 1], [2, 3]],
        weft.Strategy(batch={"*": (S(0), B)}, parameters={"head.weight": (B, S(0))}),
    ),
    "all deduced": ({"started": True}, [0, 1], weft.Strategy()),
}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("case", CASES)
def test_layers_train_as_on_one_device(case: str) -> None:
    options, grid, strategy = CASES[case]
    torch.manual_seed(0)
    model = Tagger(**options)
    data = batches(n=2 if "samples" in case else 8)
    clip = partial(clip_grad_norm_, max_norm=strategy.clip_norm) if strategy.clip_norm else None
    with compiled(model, loss_fn, data[0], grid, strategy) as program:
        assert layers(program) >= 2
        assert str(parse_graph(str(program.graph))) == str(program.graph)
        assert_same_training(program, data, plain_training(model, loss_fn, data, clip))


@pytest.mark.usefixtures("double_precision")
def test_layers_with_split_weights_are_taken_apart() -> None:
    torch.manual_seed(0)
    model, data = Tagger(), batches()
    strategy = weft.Strategy(batch={"*": B}, parameters={"lstm.weight_ih_l1": S(0)})
    with compiled(model, loss_fn, data[0], [0, 1], strategy) as program:
        assert layers(program) == 0
        assert_same_training(program, data, plain_training(model, loss_fn, data))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_kernel_trains_as_on_one_device(precision: Any) -> None:
    """In float32 and under autocast, where oneDNN's kernel runs and saves what it alone knows."""
    if precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("plain PyTorch itself cannot train an LSTM under bf16 autocast on this CPU")
    torch.manual_seed(0)
    model, data = Tagger(bidirectional=True), batches(3)
    strategy = replace(DATA, micro_batches=2, recompute=["lstm"], precision=precision)

    def autocast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None):
            return loss_fn(model, batch)

    losses, state = plain_training(model, autocast_loss, data)
    tolerance = 1e-4 if precision is None else 3e-2
    with compiled(model, loss_fn, data[0], [0, 1], strategy) as program:
        found = [program.step(batch).item() for batch in data]
        assert found == pytest.approx(losses, rel=tolerance)
        assert_same_state(program.full_state_dict(), state, 5 * tolerance)


def test_what_a_layer_saves_is_for_its_backward_alone() -> None:
    text = """
graph "read elsewhere"
%x = batch "x" : float32[3, 2, 4]
%w = parameter "w" : float32[24, 4]
%u = parameter "u" : float32[24, 6]
%h = batch "h" : float32[2, 6]
%out, %last, %cell, %saved = call weft.lstm(%x, %w, %u, None, None, %h, %h, False, True) : \
float32[3, 2, 6], float32[2, 6], float32[2, 6], uint8[2, 64]
%all = call weft.pack(%saved, 0) : uint8[4, 64]
output "all" %all
"""
    with pytest.raises(InternalError, match=r"%saved of weft\.lstm .* expected its backward alone"):
        verify(parse_graph(text))
