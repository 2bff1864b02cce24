"""The user's model and optimizer are the program's: what either does, the other sees, as in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import weft
from program.live_models import STRATEGIES, Net, batch, loss_fn, twins
from single_device import assert_same_state, whole, whole_state

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


@every_strategy
def test_the_model_and_the_optimizer_are_trained(name: str) -> None:
    with twins(name) as both:
        both.step(3)
        both.check()
        assert isinstance(both.model.first.weight, weft.GlobalTensor) == (name != "one rank")


@every_strategy
def test_objects_stay_the_same(name: str) -> None:
    torch.manual_seed(0)
    model = Net().double()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with twins(name, lambda: model) as both:
        both.step()
        after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert list(after) == list(before)
        assert all(after[key] is tensor for key, tensor in before.items())
        assert all(isinstance(each, nn.Parameter) for each in model.parameters())
        assert set(both.optimizer.state) == set(model.parameters())


def clamped(model: Net, _: Any) -> None:
    with torch.no_grad():
        model.first.weight.clamp_(-0.05, 0.05)
        model.last.bias.zero_()


def data_replaced(model: Net, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def data_written(model: Net, _: Any) -> None:
    model.last.weight.data.mul_(0.5)
    model.first.weight.data[2:4] = 0.25


def buffers_written(model: Net, _: Any) -> None:
    model.norm.running_mean.fill_(0.5)
    model.norm.reset_running_stats()


def one_vector(model: Net, _: Any) -> None:
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector * 0.9, model.parameters())


def loaded(model: Net, _: Any) -> None:
    torch.manual_seed(3)
    model.load_state_dict(Net().double().state_dict())


def own_loaded(model: Net, _: Any) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def learning_rate(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.1


def states_scaled(_: Any, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def states_replaced(_: Any, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def states_loaded(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def states_cleared(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


WRITES: tuple[Callable[[Any, Any], None], ...] = (
    *(clamped, data_replaced, data_written, buffers_written, one_vector, loaded, own_loaded),
    *(learning_rate, states_scaled, states_replaced, states_loaded, states_cleared),
)


@every_strategy
def test_the_next_step_sees_what_users_write(name: str) -> None:
    with twins(name) as both:
        both.step()
        for write in WRITES:
            both.both(write)
            both.step(2)
            both.check()


@every_strategy
def test_a_checkpoint_goes_back(name: str) -> None:
    with twins(name) as both:
        both.step()
        states = copy.deepcopy((both.plain.state_dict(), both.other.state_dict()))
        own = whole_state(both.model)
        kept = {key: value.clone() for key, value in own.items()}
        both.step(2)
        assert_same_state(kept, states[0], 1e-9)
        for model, optimizer in ((both.model, both.optimizer), (both.plain, both.other)):
            model.load_state_dict(states[0])
            optimizer.load_state_dict(copy.deepcopy(states[1]))
        both.step(2)
        both.check()


@every_strategy
def test_eager_steps_between(name: str) -> None:
    with twins(name) as both:
        for _ in range(2):
            both.step()
            both.eager_step()
        both.step()
        both.check()


@every_strategy
def test_eager_calls_between(name: str) -> None:
    """As for validation or generation: a loop of calls, each on what the one before has made."""

    def walk(model: nn.Module) -> torch.Tensor:
        x = batch(50)["x"]
        with torch.no_grad():
            for _ in range(3):
                x = torch.cat([whole(model(x)), x], 1)[:, :6]
        return x

    with twins(name) as both:
        both.step(2)
        both.both(lambda model, _: model.eval())
        torch.testing.assert_close(walk(both.model), walk(both.plain))
        both.both(lambda model, _: model.train())
        both.step()
        both.check()


@every_strategy
def test_averages_of_the_model(name: str) -> None:
    with twins(name) as both:
        average, expected = (
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            for model in (both.model, both.plain)
        )
        for _ in range(3):
            both.step()
            average.update_parameters(both.model)
            expected.update_parameters(both.plain)
        assert_same_state(whole_state(average), expected.state_dict(), 1e-9)
        both.check()


@every_strategy
def test_a_copy_is_its_own(name: str) -> None:
    with twins(name) as both:
        both.step()
        copied = copy.deepcopy(both.model)
        expected = copy.deepcopy(both.plain.state_dict())
        both.step()
        assert_same_state(whole_state(copied), expected, 1e-9)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        both.step()
        both.check()


class Counting(torch.optim.Optimizer):
    """Keeps a number of Python for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"] / state["step"])


@every_strategy
def test_numbers_among_the_states(name: str) -> None:
    with twins(name, make_optimizer=lambda model: Counting(model.parameters())) as both:
        both.step(2)
        both.check()
        assert {state["step"] for state in both.optimizer.state.values()} == {2}

        def begin_again(_: Any, optimizer: torch.optim.Optimizer) -> None:
            for state in optimizer.state.values():
                state["step"] = 0

        both.both(begin_again)
        both.step()
        both.eager_step()
        both.step()
        both.check()
        assert {state["step"] for state in both.optimizer.state.values()} == {3}


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return found


class Recurrent(nn.Module):
    """A layer that refers to its weights weakly, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x[:, None])[0][:, 0])
        return found


@pytest.mark.parametrize("name", ["one rank", "data", "zero 3", "pipeline"])
@pytest.mark.parametrize("make_model", [Tied, Recurrent])
def test_tied_and_recurrent_weights(make_model: Callable[[], nn.Module], name: str) -> None:
    with twins(name, make_model) as both:
        both.step(2)
        both.eager_step()
        both.step()
        both.check()
    if make_model is Tied:
        assert both.model.first.weight is both.model.last.weight


@every_strategy
def test_a_model_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = Net()
    grid, strategy = STRATEGIES[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    with weft.local_world(torch.tensor(grid).numel()):
        given = {"x": batch(1)["x"].float(), "y": batch(1)["y"]}
        program = weft.compile(
            model,
            loss_fn,
            optimizer,
            given,
            placement=weft.placement("cpu", grid),
            strategy=strategy,
        )
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        plain = Net()
        plain.load_state_dict(whole_state(model))
        expected = loss_fn(plain, given)
        assert program.step(given).item() == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        for parameter in plain.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.1)
        assert_same_state(whole_state(model), plain.state_dict(), 1e-5)
        program.close()
