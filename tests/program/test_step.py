"""weft.Step: one capture for many strategies, another one only where a strategy needs it, errors where it has aged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import MLP, classification_loss, vector_batch
from single_device import assert_same_state, whole_state
from weft.errors import UserError
from weft.ir import parse_graph

S, B = weft.split, weft.broadcast
PAIR = weft.placement("cpu", [0, 1])
DATA = weft.data_parallel()


def step_of(model: nn.Module, kind: Any = torch.optim.SGD, **options: Any) -> weft.Step:
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    kind = next(model.parameters()).dtype
    batch = {name: x.to(kind) if name == "x" else x for name, x in vector_batch(8).items()}
    return weft.Step(model, classification_loss, optimizer, batch)


def trained(program: weft.Program, count: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [float(program.step(vector_batch(8, seed=seed))) for seed in range(count)]
    return losses, program.full_state_dict()


def plainly(model: nn.Module, count: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(count):
        optimizer.zero_grad()
        loss = classification_loss(model, vector_batch(8, seed=seed))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_strategies_share_a_capture_and_train_as_one_device() -> None:
    torch.manual_seed(0)
    model = MLP().double()
    step, before = step_of(model), copy.deepcopy(model.state_dict())
    losses, state = plainly(model)
    objects = dict(model.named_parameters())
    strategies = (
        DATA,
        weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(3)),
        weft.Strategy(batch={"*": S(0)}, stages=2, micro_batches=2),
        weft.Strategy(parameters={"*.weight": S(0)}),
    )
    with weft.local_world(2):
        for strategy in strategies:
            model.load_state_dict(before)
            program = weft.compile(step, placement=PAIR, strategy=strategy)
            found, whole = trained(program)
            program.close()
            assert found == pytest.approx(losses, rel=1e-10)
            assert_same_state(whole, state)
            assert_same_state(whole_state(model), whole, 0)
    assert len(step.captures) == 1
    assert all(objects[name] is parameter for name, parameter in model.named_parameters())
    assert parse_graph(str(step.captures[0].graph)) == step.captures[0].graph


def test_a_strategy_reads_the_values_that_parameters_have_now() -> None:
    torch.manual_seed(0)
    model = MLP().double()
    step, plain = step_of(model), copy.deepcopy(model)
    with weft.local_world(2):
        weft.compile(step, placement=PAIR).close()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
            for parameter in plain.parameters():
                parameter.mul_(0.5)
        losses, _ = trained(weft.compile(step, placement=PAIR))
    assert losses == pytest.approx(plainly(plain)[0], rel=1e-10)


def test_another_precision_is_captured_once_more() -> None:
    step = step_of(MLP())
    half = weft.Strategy(batch={"*": S(0)}, precision="bf16")
    with weft.local_world(2):
        for strategy in (DATA, half, DATA, half):
            weft.compile(step, placement=PAIR, strategy=strategy).close()
    assert len(step.captures) == 2


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(x[:, None])[0][:, 0])
        return out


def test_only_weights_of_recurrent_layers_in_pieces_need_another_capture() -> None:
    model = Tagger()
    step = step_of(model)
    one = step.captured(apart=())
    assert step.captured(apart=("head.weight",)) is one
    other = step.captured(apart=("lstm.weight_ih_l0",))
    assert other is not one
    assert step.captured(apart=("lstm.weight_ih_l0", "head.weight")) is other
    assert "weft.lstm" in str(one.graph)
    assert "weft.lstm" not in str(other.graph)
    assert len(step.captures) == 2


def wider(model: MLP, step: weft.Step) -> None:
    model.extra = nn.Parameter(torch.zeros(3))


def frozen(model: MLP, step: weft.Step) -> None:
    next(model.parameters()).requires_grad_(False)


def evaluated(model: MLP, step: weft.Step) -> None:
    model.eval()


def with_momentum(model: MLP, step: weft.Step) -> None:
    assert step.optimizer is not None
    step.optimizer.param_groups[0]["momentum"] = 0.9


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (wider, "extra"),
        (frozen, "not trained"),
        (evaluated, "eval mode"),
        (with_momentum, "momentum"),
    ],
)
def test_a_step_that_has_aged_says_what_has_changed(
    change: Callable[[MLP, weft.Step], None], named: str
) -> None:
    model = MLP()
    step = step_of(model)
    step.captured()
    change(model, step)
    with pytest.raises(UserError, match=rf"(?s){named}.*make a new weft.Step"):
        step.captured()


def test_a_schedule_of_the_learning_rate_does_not_age_a_step() -> None:
    step = step_of(MLP(), momentum=0.9)
    one = step.captured()
    assert step.optimizer is not None
    step.optimizer.param_groups[0].update(lr=0.05, momentum=0.8)
    assert step.captured() is one
    torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda epoch: epoch / 3)  # notes, and 0
    assert step.captured() is one


def test_a_program_s_step_is_that_of_what_model_and_optimizer_are_now() -> None:
    model = MLP()
    step = step_of(model, momentum=0.9)
    with weft.local_world(2):
        program = weft.compile(step, placement=PAIR)
        before = program.stored()
        next(model.parameters()).requires_grad_(False)
        assert str(program.stored().graph) != str(before.graph)
        program.close()


def test_a_step_is_compiled_without_the_arguments_that_it_holds() -> None:
    model = MLP()
    step = step_of(model)
    with weft.local_world(2):
        with pytest.raises(UserError, match="the step has them"):
            weft.compile(step, classification_loss, placement=PAIR)
        with pytest.raises(UserError, match="loss_fn, optimizer and example_batch"):
            weft.compile(model, placement=PAIR)
