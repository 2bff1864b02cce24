"""What Python holds around a step, and the user changes between steps or in it: told, never ignored."""

from __future__ import annotations

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
from weft.errors import CaptureError, UserError

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


def squares(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def compiled(model: nn.Module, loss_fn: Any = squares) -> weft.Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = weft.placement("cpu", [0, 1])
    return weft.compile(model, loss_fn, optimizer, torch.ones(8, 8), placement=ranks)


def change_factor(_: Scaled) -> None:
    globals()["FACTOR"] = 2.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "scale", 3.0), "scale was 2.0 when the step was captured and is 3.0"),
        (lambda m: setattr(m, "scale", 2), "scale was 2.0 when the step was captured and is 2 "),
        (lambda m: setattr(m, "flag", 1), "flag was True"),
        (lambda m: delattr(m, "flag"), "flag was True when the step was captured and is gone"),
        (lambda m: setattr(m, "sizes", (64,)), "sizes was (8, 8)"),
        (lambda m: setattr(m.config, "factor", 4), "config.factor was 3"),
        (lambda m: m.weights.__setitem__(0, 5.0), "weights[0] was 1.0"),
        (lambda m: m.weights.clear(), "weights[0] was 1.0"),
        (lambda m: m.table.update(a=2.0), "table['a'] was 1.0"),
        (lambda m: setattr(m, "tensor", torch.zeros(8)), "tensor was a tensor [8]"),
        (lambda m: m.eval(), "dropout.training was True"),
        (lambda m: setattr(m.dropout, "p", 0.5), "dropout.p was 0.0"),
        (lambda m: m.layer.bias.requires_grad_(False), "layer.bias.requires_grad was True"),
        (change_factor, "the global FACTOR was 1.0"),
    ],
)
def test_what_changes_between_steps_is_told(
    change: Callable[[Any], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    model = Scaled()
    with weft.local_world(2):
        program = compiled(model)
        program.step(torch.ones(8, 8))
        change(model)
        with pytest.raises(UserError) as caught:
            program.step(torch.ones(8, 8))
    assert words in str(caught.value)


def test_what_does_not_matter_may_change() -> None:
    model = Scaled()
    with weft.local_world(2):
        program = compiled(model)
        model.unread = 2.0
        model.scale = float("2")
        model.weights[1] += 0.0
        model.tensor.fill_(1)
        program.step(torch.ones(8, 8))


def test_numbers_of_closures() -> None:
    weight = 1.0

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        return squares(model, batch) * weight

    with weft.local_world(2):
        program = compiled(Scaled(), loss_fn)
        program.step(torch.ones(8, 8))
        weight = 0.5
        with pytest.raises(UserError, match=r"weight in the closure of .*loss_fn was 1\.0"):
            program.step(torch.ones(8, 8))


def test_numbers_of_the_object_that_a_method_belongs_to() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight = 1.0

        def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
            return squares(model, batch) * self.weight

    trainer = Trainer()
    with weft.local_world(2):
        program = compiled(Scaled(), trainer.loss)
        program.step(torch.ones(8, 8))
        trainer.weight = 0.5
        with pytest.raises(UserError, match=r"Trainer\.weight was 1\.0"):
            program.step(torch.ones(8, 8))


def test_a_group_that_is_added_later() -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    model.extra = nn.Parameter(torch.ones(8))
    with weft.local_world(2):
        ranks = weft.placement("cpu", [0, 1])
        program = weft.compile(model, squares, optimizer, torch.ones(8, 8), placement=ranks)
        optimizer.add_param_group({"params": [model.extra]})
        with pytest.raises(UserError, match="number of parameters in each group"):
            program.step(torch.ones(8, 8))


def test_a_step_of_another_value_is_captured_anew() -> None:
    model, batch = Scaled(), torch.ones(8, 8)
    step = weft.Step(model, squares, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    with weft.local_world(2):
        ranks = weft.placement("cpu", [0, 1])
        losses = []
        for model.scale in (2.0, 4.0):
            losses.append(weft.compile(step, placement=ranks).step(batch).item())
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
    with weft.local_world(2):
        found = compiled(model).step(batch)
    assert model.cache is None
    torch.testing.assert_close(found, squares(model, batch).detach())


loss = 0.0


class Result:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


def test_what_lies_beside_what_is_read_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight, self.global_step = 1.0, 0
            self.state = {"temperature": 2.0, "epoch": 0}

        def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
            return Result(squares(model, batch) * self.weight * self.state["temperature"]).loss

    model, trainer = Scaled(), Trainer()
    with weft.local_world(2):
        program = compiled(model, trainer.loss)
        for number in range(3):
            monkeypatch.setitem(globals(), "loss", program.step(torch.ones(8, 8)).item())
            trainer.global_step += 1
            trainer.state["epoch"] = number
            model.config.name = str(number)
        trainer.state["temperature"] = 1.0
        with pytest.raises(UserError, match="temperature"):
            program.step(torch.ones(8, 8))


def test_two_lists_of_which_one_holds_no_numbers() -> None:
    class Listing(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.heads = [object(), object()]

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * len(self.heads) * self.weights[1]

    model = Listing()
    with weft.local_world(2):
        program = compiled(model)
        model.weights[1] = 7.0
        with pytest.raises(UserError, match=r"weights\[1\]"):
            program.step(torch.ones(8, 8))


def test_a_value_that_another_shape_depends_on() -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * (self.scale if x.shape[0] > 4 else 1.0)

    model = Branching(8, 8)
    model.scale = 2.0
    with weft.local_world(2):
        program = compiled(model)
        program.step(torch.ones(4, 8))
        model.scale = 3.0
        program.step(torch.ones(4, 8))
        with pytest.raises(UserError, match="scale was 2"):
            program.step(torch.ones(8, 8))


def test_containers_of_other_threads_keep_what_comes_meanwhile() -> None:
    waiting: queue.Queue[int] = queue.Queue()
    losses: list[Any] = []

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        waiting.put(1)  # as a loader's thread does
        losses.append(squares(model, batch))
        return losses[-1]

    with weft.local_world(2):
        compiled(Scaled(), loss_fn)
    assert waiting.qsize() == 1
    assert losses == []
