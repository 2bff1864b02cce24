"""Writes of a step and its optimizer beside the update: teachers, `tensor.data`, hooks behind a step, averages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import weft
from single_device import assert_same_state, whole_state
from weft.errors import CaptureError, UserError

S, B = weft.split, weft.broadcast
PAIR = [0, 1]
STRATEGIES: dict[str, tuple[list[int], weft.Strategy]] = {
    "one": ([0], weft.data_parallel()),
    "data": (PAIR, weft.data_parallel()),
    "columns": (PAIR, weft.Strategy(batch={"*": B}, parameters={"first.weight": S(0)})),
    "zero": (PAIR, weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(3))),
    "stages": (PAIR, weft.Strategy(stages=2, micro_batches=2)),
}


def batches(count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(count)]


def squares(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


@contextmanager
def compiled(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str
) -> Iterator[weft.Program]:
    grid, strategy = STRATEGIES[name]
    with weft.local_world(len(grid)):
        place = weft.placement("cpu", grid)
        program = weft.compile(
            model, squares, optimizer, batches()[0], placement=place, strategy=strategy
        )
        yield program
        program.close()


def check(
    model: nn.Module,
    name: str,
    between: Callable[[nn.Module], Any] = lambda _: None,
    loss_fn: Callable[..., Any] = squares,
    hook: Callable[..., Any] | None = None,
) -> None:
    """Train a copy by plain PyTorch and the model by weft: losses and final tensors are equal."""
    plain = copy.deepcopy(model)
    own, other = sgd(model), sgd(plain)
    for each in (own, other) if hook else ():
        each.register_step_post_hook(hook)  # type: ignore[arg-type]
    with compiled(model, own, name) as program:
        for batch in batches():
            other.zero_grad()
            loss = loss_fn(plain, batch)
            loss.backward()
            other.step()
            between(plain)
            assert program.step(batch).item() == pytest.approx(loss.item(), rel=1e-12)
            between(model)
        assert_same_state(program.full_state_dict(), plain.state_dict(), 1e-12)
        assert_same_state(whole_state(model), plain.state_dict(), 1e-12)


class Student(nn.Module):
    """With a teacher that follows it, as the step says; `write(own, student)` writes one of its parameters."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.teacher = nn.Linear(6, 5).requires_grad_(False)
        self.write = write

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            for own, followed in zip(
                self.teacher.parameters(), self.first.parameters(), strict=True
            ):
                self.write(own, followed)
        made = self.first(x)
        return torch.cat([self.last(made), made - self.teacher(x)], 1)


def in_place(own: torch.Tensor, student: torch.Tensor) -> None:
    own.mul_(0.9).add_(student, alpha=0.1)


def by_data(own: torch.Tensor, student: torch.Tensor) -> None:
    own.data = own.data * 0.9 + student.data * 0.1


@pytest.mark.parametrize(
    ("strategy", "write"), [*((name, in_place) for name in STRATEGIES), ("data", by_data)]
)
def test_a_step_writes_parameters_that_are_not_trained(strategy: str, write: Any) -> None:
    check(seeded(lambda: Student(write)), strategy)


def test_verify_compares_parameters_that_a_step_writes() -> None:
    model = seeded(lambda: Student(in_place))
    with compiled(model, sgd(model), "data") as program:
        program.step(batches()[0])
        before = whole_state(model)
        program.verify(batches()[1])
        assert_same_state(whole_state(model), before, 0)


class Following(nn.Module):
    """Its buffer gets another memory in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> Any:
        made = self.first(x)
        self.mean.data = self.mean.data * 0.9 + made.detach().mean(0) * 0.1
        return made - self.mean


def test_values_put_into_the_data_of_a_buffer() -> None:
    check(seeded(Following), "data")


def halved(model: nn.Module) -> None:
    for each in model.parameters():
        each.data = each.data * 0.5


@pytest.mark.parametrize("strategy", ["one", "data"])
def test_values_put_into_data_between_steps_are_there_at_once(strategy: str) -> None:
    check(seeded(lambda: nn.Linear(6, 3)), strategy, halved)


def clamps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    assert args == (optimizer,)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.clamp_(-0.2, 0.2)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x))


@pytest.mark.parametrize("strategy", ["one", "zero", "stages"])
def test_hooks_behind_a_step_are_called(strategy: str) -> None:
    check(seeded(Pair), strategy, hook=clamps)


def test_hooks_behind_a_step_come_and_go_and_are_not_called_by_the_check() -> None:
    model, calls = seeded(lambda: nn.Linear(6, 3)), list[Any]()
    optimizer = sgd(model)
    with compiled(model, optimizer, "data") as program:
        handle = optimizer.register_step_post_hook(lambda *args: calls.append(args))
        program.step(batches()[0])
        program.step(batches()[0], update=False)
        assert len(calls) == 1
        program.update()
        program.verify(batches()[0])
        assert len(calls) == 2
        assert program._core.variants.current.number == 0  # planned once
        handle.remove()
        program.step(batches()[0])
        assert len(calls) == 2
        optimizer.register_step_post_hook(lambda o, *_: o.param_groups[0]["params"][0].grad)
        with pytest.raises(UserError, match=r"reads parameter\.grad"):
            program.step(batches()[0])


def test_hooks_behind_a_step_that_may_be_left_out_are_refused() -> None:
    model = seeded(lambda: nn.Linear(6, 3)).float()
    optimizer = sgd(model)
    optimizer.register_step_post_hook(clamps)
    place, strategy = weft.placement("cpu", [0]), weft.Strategy(precision="fp16")
    with weft.local_world(1), pytest.raises(UserError, match="overflows makes no update"):
        weft.compile(
            model, squares, optimizer, batches()[0].float(), placement=place, strategy=strategy
        )


class Writing(nn.Module):
    def __init__(self, write: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.write = nn.Linear(6, 5), write

    def forward(self, x: torch.Tensor) -> Any:
        made = torch.tanh(self.first(x))
        self.write(self, made)
        return made + self.first(x)


def the_weight(model: Any, made: torch.Tensor) -> None:
    model.first.weight.data.clamp_(-0.1, 0.1)


def the_weights_data(model: Any, made: torch.Tensor) -> None:
    model.first.weight.data = model.first.weight.data.clamp(-0.1, 0.1)


def another_shape(model: Any, made: torch.Tensor) -> None:
    model.first.bias.data = model.first.bias.data[:2]


def a_result(model: Any, made: torch.Tensor) -> None:
    made.data = made.data.clamp(-0.1, 0.1)


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (the_weight, "writes the parameter 'first.weight' in place"),
        (the_weights_data, "writes the parameter 'first.weight' in place"),
        (another_shape, "keep shape and dtype"),
        (a_result, "outside the model"),
    ],
)
def test_other_writes_are_refused(write: Any, text: str) -> None:
    model = seeded(lambda: Writing(write))
    with pytest.raises(CaptureError, match=text), compiled(model, sgd(model), "data"):
        pass


def test_a_write_to_a_parameter_that_is_cast_is_refused() -> None:
    model = seeded(lambda: Student(in_place)).float()
    strategy = weft.Strategy(precision=weft.Precision(parameters="bf16"))
    with weft.local_world(1), pytest.raises(CaptureError, match=r"teacher\.weight in place, which"):
        weft.compile(
            model,
            squares,
            sgd(model),
            batches()[0].float(),
            placement=weft.placement("cpu", [0]),
            strategy=strategy,
        )


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.norm(self.first(x))))


def in_halves(model: nn.Module, batch: torch.Tensor) -> Any:
    return sum(squares(model, half) for half in batch.chunk(2)) / 2


@pytest.mark.parametrize("strategy", ["one", "data", "stages"])
def test_a_cumulative_average_counts_the_batches(strategy: str) -> None:
    check(seeded(Normed), strategy, loss_fn=in_halves if strategy == "stages" else squares)


def test_a_batch_stays_as_it_was() -> None:
    """What the step writes into it counts in the step alone; each begins with the same values."""

    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Any:
        batch["x"].mul_(1.5)
        batch["made"] = model(batch["x"])
        batch["count"] += 1
        return batch["made"].square().mean() * batch["count"]

    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    plain = copy.deepcopy(model)
    with weft.local_world(2):
        batch: dict[str, Any] = {"x": batches()[0], "count": 1}
        kept = {name: copy.copy(value) for name, value in batch.items()}
        kept["x"] = batch["x"].clone()
        optimizer, other = sgd(model), sgd(plain)
        place = weft.placement("cpu", PAIR)
        program = weft.compile(model, loss_fn, optimizer, batch, placement=place)
        for _ in range(2):
            loss = loss_fn(plain, {"x": kept["x"].clone(), "count": 1})
            other.zero_grad()
            loss.backward()
            other.step()
            assert program.step(batch).item() == pytest.approx(loss.item(), rel=1e-12)
        assert batch.keys() == kept.keys()
        assert batch["count"] == 1
        assert torch.equal(batch["x"], kept["x"])
        program.close()
