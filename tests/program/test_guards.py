"""What Python holds around a step, and the user changes between steps or in it: never ignored."""

from __future__ import annotations

import copy
import logging
import queue
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import weft
from beside_plain import Both, compiled, squares
from weft.errors import CaptureError

FACTOR = 1.0


def doubled(x: Any) -> Any:
    return x * 2 * FACTOR


class Scaled(nn.Module):
    """Reads values of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.0)
        self.scale, self.flag, self.sizes = 2.0, True, (8, 8)
        self.config = SimpleNamespace(factor=3, name="a")
        self.weights, self.table = [1.0, 2.0], {"a": 1.0}
        self.tensor = torch.ones(8)
        self.unread = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        x = self.dropout(self.layer(x)) * self.scale * self.tensor
        if self.flag:
            x = x * self.config.factor * self.weights[0] * self.table["a"]
        return doubled(x).reshape(self.sizes)


@pytest.fixture
def planned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Why steps were planned anew, so far."""
    caplog.set_level(logging.INFO, "weft")
    return lambda: [text for text in caplog.messages if "planned the step again" in text]


def change_factor(_: Scaled) -> None:
    globals()["FACTOR"] = 2.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "scale", 3.0), "scale was 2.0 and is 3.0"),
        (lambda m: setattr(m, "scale", 2), "scale was 2.0 and is 2"),
        (lambda m: setattr(m, "flag", 0), "flag was True"),
        (lambda m: setattr(m, "sizes", (64,)), "sizes was (8, 8)"),
        (lambda m: setattr(m.config, "factor", 4), "config.factor was 3"),
        (lambda m: m.weights.__setitem__(0, 5.0), "weights[0] was 1.0"),
        (lambda m: m.table.update(a=2.0), "table['a'] was 1.0"),
        (lambda m: setattr(m, "tensor", torch.full((8,), 0.5)), "tensor was a tensor [8]"),
        (lambda m: m.eval(), "dropout.training was True"),
        (lambda m: setattr(m.dropout, "p", 1.0), "dropout.p was 0.0"),
        (lambda m: m.layer.bias.requires_grad_(False), "layer.bias.requires_grad was True"),
        (change_factor, "the global FACTOR was 1.0"),
    ],
)
def test_what_changes_between_steps_counts_from_the_next_one(
    change: Callable[[Any], Any],
    words: str,
    planned: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    with weft.local_world(2):
        both = Both(Scaled())
        both.step()
        assert not planned()
        both.change(change)
        both.step()
        both.step()
    (why,) = planned()
    assert words in why


def test_what_is_changed_back_needs_no_other_plan(planned: Callable[[], list[str]]) -> None:
    with weft.local_world(2):
        both = Both(Scaled())
        for scale in (2.0, 3.0, 2.0, 3.0):
            both.change(lambda model: setattr(model, "scale", scale))  # noqa: B023
            both.step()
    assert len(planned()) == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda m: delattr(m, "flag"), "AttributeError: 'Scaled' object has no attribute 'flag'"),
        (lambda m: m.weights.clear(), "IndexError: list index out of range"),
    ],
)
def test_an_error_of_the_changed_step_is_raised(change: Callable[[Any], Any], error: str) -> None:
    model = Scaled()
    flag, weights = model.flag, list(model.weights)
    with weft.local_world(2):
        both = Both(model)
        both.change(change)
        with pytest.raises(CaptureError, match=error):
            both.program.step(torch.ones(8, 8))
        both.change(lambda m: (setattr(m, "flag", flag), m.weights.__setitem__(slice(0), weights)))
        both.step()


def test_what_does_not_matter_may_change(planned: Callable[[], list[str]]) -> None:
    model = Scaled()
    with weft.local_world(2):
        program = compiled(model)
        model.unread = 2.0
        model.scale = float("2")
        model.weights[1] += 0.0
        model.tensor.fill_(1)
        program.step(torch.ones(8, 8))
    assert not planned()


def test_numbers_of_closures(planned: Callable[[], list[str]]) -> None:
    weight = 1.0

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        return squares(model, batch) * weight

    with weft.local_world(2):
        both = Both(Scaled(), loss_fn)
        both.step()
        weight = 0.5
        both.step()
    assert "loss_fn was 1.0 and is 0.5" in planned()[0]


def test_numbers_of_the_object_that_a_method_belongs_to(planned: Callable[[], list[str]]) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight = 1.0

        def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
            return squares(model, batch) * self.weight

    trainer = Trainer()
    with weft.local_world(2):
        both = Both(Scaled(), trainer.loss)
        for trainer.weight in (1.0, 0.5):
            both.step()
    assert "Trainer.weight was 1.0" in planned()[0]


def test_hooks_that_come_and_go(planned: Callable[[], list[str]]) -> None:
    """Of a module that had none, and of one that had one; what each does counts from the next step on."""

    def twice(_: nn.Module, __: Any, result: torch.Tensor) -> torch.Tensor:
        return result * 2

    model = Scaled()
    model.layer.register_forward_hook(twice)
    with weft.local_world(2):
        both = Both(model)
        both.step()
        both.change(lambda m: m.dropout.register_forward_hook(twice))
        both.step()
        both.change(lambda m: m.layer._forward_hooks.clear())
        both.step()
    assert ["hooks of modules and optimizers were" in why for why in planned()] == [True, True]


def test_a_parameter_that_takes_the_place_of_another_in_a_group(
    planned: Callable[[], list[str]],
) -> None:
    """The groups hold as many as before."""

    def of_weights(model: Scaled) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.layer.weight], lr=0.01)

    with weft.local_world(2):
        both = Both(Scaled(), make_optimizer=of_weights)
        both.step()
        for model, optimizer in ((both.model, both.optimizer), (both.plain, both.other)):
            optimizer.param_groups[0]["params"] = [model.layer.bias]
            model.layer.weight.grad = None
        both.step()
    assert "the parameters in the optimizer's groups were others" in planned()[0]


def test_a_group_that_is_added_later(planned: Callable[[], list[str]]) -> None:
    def of_weights(model: Scaled) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.layer.weight], lr=0.01, momentum=0.9)

    with weft.local_world(2):
        both = Both(Scaled(), make_optimizer=of_weights)
        both.step()
        for model, optimizer in ((both.model, both.optimizer), (both.plain, both.other)):
            optimizer.add_param_group({"params": [model.layer.bias], "lr": 0.02})
        both.step()
        both.step()
    assert "the parameters in the optimizer's groups were others" in planned()[0]


def test_a_step_of_another_value_is_captured_anew() -> None:
    model, batch = Scaled(), torch.ones(8, 8)
    state = copy.deepcopy(model.state_dict())
    step = weft.Step(model, squares, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    with weft.local_world(2):
        ranks = weft.placement("cpu", [0, 1])
        losses = []
        for model.scale in (2.0, 4.0):
            losses.append(weft.compile(step, placement=ranks).step(batch).item())
            model.load_state_dict(state)
    assert losses[1] == pytest.approx(4 * losses[0])
    assert len(step.captures) == 1


class Counting(Scaled):
    def forward(self, x: torch.Tensor) -> Any:
        self.scale += 1
        return super().forward(x)


class Drawing(Scaled):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.draw()


class Caching(Scaled):
    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.make, self.cache = make, None

    def forward(self, x: torch.Tensor) -> Any:
        if self.cache is None:
            self.cache = self.make(x)
        return super().forward(x) + self.cache


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Counting, "changes scale from 2.0 to 3.0"),
        (lambda: Drawing(random.random), "random numbers"),
        (lambda: Drawing(numpy.random.rand), "random numbers"),
        (lambda: Caching(lambda x: x.mean()), "keeps in cache a tensor that depends on the batch"),
    ],
)
def test_steps_that_would_differ_each_time_are_refused(
    make: Callable[[], Scaled], words: str
) -> None:
    model = make()
    with weft.local_world(2), pytest.raises(CaptureError) as caught:
        compiled(model)
    assert words in str(caught.value)
    assert model.scale == 2.0


@pytest.mark.parametrize(
    "make", [lambda x: torch.arange(8.0), lambda x: x.new_ones(8), lambda x: torch.zeros_like(x)]
)
def test_caches_that_never_change(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, batch = Caching(make), torch.ones(8, 8)
    plain = copy.deepcopy(model)
    with weft.local_world(2):
        found = compiled(model).step(batch)
    assert model.cache is None
    torch.testing.assert_close(found, squares(plain, batch).detach())


loss = 0.0


class Result:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


def test_what_lies_beside_what_is_read_may_change(
    planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight, self.global_step = 1.0, 0
            self.state = {"temperature": 2.0, "epoch": 0}

        def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
            return Result(squares(model, batch) * self.weight * self.state["temperature"]).loss

    trainer = Trainer()
    with weft.local_world(2):
        both = Both(Scaled(), trainer.loss)
        for number in range(3):
            monkeypatch.setitem(globals(), "loss", both.step())
            trainer.global_step += 1
            trainer.state["epoch"] = number
            both.change(lambda model: setattr(model.config, "name", "b"))
        assert not planned()
        trainer.state["temperature"] = 1.0
        both.step()
    assert "temperature" in planned()[0]


def test_two_lists_of_which_one_holds_no_numbers(planned: Callable[[], list[str]]) -> None:
    class Listing(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.heads = [object(), object()]

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * len(self.heads) * self.weights[1]

    with weft.local_world(2):
        both = Both(Listing())
        both.change(lambda model: model.weights.__setitem__(1, 7.0))
        both.step()
    assert "weights[1]" in planned()[0]


def test_a_value_that_another_shape_depends_on(planned: Callable[[], list[str]]) -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * (self.scale if x.shape[0] > 4 else 1.0)

    model = Branching(8, 8)
    model.scale = 2.0
    with weft.local_world(2):
        both = Both(model)
        both.step(8)
        both.step(4)
        assert len(planned()) == 1
        both.change(lambda model: setattr(model, "scale", 3.0))
        both.step(4)
        assert len(planned()) == 1
        both.step(8)
    assert len(planned()) == 2


def test_containers_of_other_threads_keep_what_comes_meanwhile() -> None:
    waiting: queue.Queue[int] = queue.Queue()
    losses: list[Any] = []

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        waiting.put(1)  # as a loader's thread does
        losses.append(squares(model, batch))
        return losses[-1]

    with weft.local_world(2):
        compiled(Scaled(), loss_fn)
    assert waiting.qsize() == 2  # a step that has changed what it could read is traced twice
    assert losses == []
