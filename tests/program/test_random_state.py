"""States of random numbers that a step sets: what it draws from them is refused, what it reads and puts back is not."""

from __future__ import annotations

import os
import random
import secrets
import threading
import uuid
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from single_device import compiled, plain_training
from weft.errors import CaptureError, VerificationError
from weft.program.data.order import drawn_by

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DEFAULT = torch.default_generator


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()


def refused(loss: Any) -> str:
    refusing = compiled(net(), loss, BATCH, [0, 1], weft.data_parallel())
    with pytest.raises(CaptureError) as caught, refusing:
        pass
    return str(caught.value)


def manual_seed(model: nn.Module, x: torch.Tensor) -> Any:
    torch.manual_seed(5)  # SET
    return model(x).square().mean()


def of_torch_random(model: nn.Module, x: torch.Tensor) -> Any:
    torch.random.manual_seed(5)  # SET
    return model(x).square().mean()


def default_generator(model: nn.Module, x: torch.Tensor) -> Any:
    torch.default_generator.manual_seed(5)  # SET
    return model(x).square().mean()


def the_same_state_twice(model: nn.Module, x: torch.Tensor) -> Any:
    state = torch.get_rng_state()
    one = model(x)
    torch.set_rng_state(state)  # SET
    return (one - model(x)).square().mean() + one.square().mean()


def behind_a_fork(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.random.fork_rng():  # SET
        one = model(x)
    return (one - model(x)).square().mean() + one.square().mean()


def seeded_in_a_fork(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)  # SET
        noise = torch.rand_like(x)
    return model(x + noise).square().mean()


def seed(model: nn.Module, x: torch.Tensor) -> Any:
    torch.manual_seed(torch.seed())  # SET
    return model(x).square().mean()


class Seeding(torch.autograd.Function):
    """Draws in its backward what it has drawn in the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        torch.manual_seed(7)  # SET
        return x * (torch.rand_like(x) < 0.5)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        torch.manual_seed(7)
        return gradients[0] * (torch.rand_like(gradients[0]) < 0.5)


def in_a_function(model: nn.Module, x: torch.Tensor) -> Any:
    return Seeding.apply(model(x)).square().mean()  # type: ignore[no-untyped-call]


def in_a_hook(model: nn.Module, x: torch.Tensor) -> Any:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)  # SET
        return gradient * torch.rand_like(gradient)

    found = model(x)
    found.register_hook(hook)
    return found.square().mean()


STEPS = [
    *(manual_seed, of_torch_random, default_generator, the_same_state_twice, behind_a_fork),
    *(seeded_in_a_fork, seed, in_a_function, in_a_hook),
]


@pytest.mark.parametrize("step", STEPS)
def test_draws_from_a_state_that_the_step_sets_are_refused(step: Any) -> None:
    message = refused(step)
    assert "from a state of torch's generator that the step has set" in message
    assert "# SET" in message


def test_an_evaluation_refuses_them_too() -> None:
    def noisy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return torch.rand_like(x)

    trained = compiled(net(), squares, BATCH, [0, 1], weft.data_parallel())
    with trained as program, pytest.raises(CaptureError, match=r"manual_seed\(3\)"):
        program.evaluation(noisy, BATCH)


def leaves_a_seed(model: nn.Module, x: torch.Tensor) -> Any:
    loss = squares(model, x)
    torch.manual_seed(3)
    return loss


def holds_the_generator(model: nn.Module, x: torch.Tensor) -> Any:
    DEFAULT.manual_seed(3)
    return squares(model, x)


def test_a_state_that_is_left_set_is_refused() -> None:
    assert "leaves it so" in refused(leaves_a_seed)
    assert "manual_seed(3)" in refused(leaves_a_seed)
    assert "DEFAULT" in refused(holds_the_generator)


def squares(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).square().mean()


def read(model: nn.Module, x: torch.Tensor) -> Any:
    """Where nothing is drawn in between, and by a seed that nobody knows."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        torch.set_rng_state(torch.get_rng_state())
    generator = torch.Generator()
    generator.manual_seed(5)
    return squares(model, x) + 0.0 * (generator.initial_seed() == 5)


def by_chance(model: nn.Module, x: torch.Tensor) -> Any:
    """As Reformer does, where nothing is dropped out."""
    torch.manual_seed(torch.seed() % 100)
    return squares(model, x)


def checkpointed(model: nn.Module, x: torch.Tensor) -> Any:
    return squares(lambda x: checkpoint(model, x, use_reentrant=False), x)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [read, by_chance, checkpointed])
def test_reading_a_state_is_legal(step: Any) -> None:
    model = net().eval()  # draws nothing
    expected, _ = plain_training(model, step, [BATCH] * 2)
    before = torch.get_rng_state()
    with compiled(model, step, BATCH, [0, 1], weft.data_parallel()) as program:
        assert [float(program.step(BATCH)) for _ in range(2)] == pytest.approx(expected)
        program.verify(BATCH)
    assert torch.equal(before, torch.get_rng_state())
    drawing = compiled(net(), step, BATCH, [0, 1], weft.data_parallel())
    if step is not by_chance:
        with drawing as program:
            program.verify(BATCH)


def test_another_seed_of_torch_that_the_step_reads_is_planned_anew() -> None:
    def scaled(model: nn.Module, x: torch.Tensor) -> Any:
        return squares(model, x) * (torch.initial_seed() % 7)

    model = net().eval()
    torch.manual_seed(1)
    with compiled(model, scaled, BATCH, [0], weft.Strategy()) as program:
        first = float(program.evaluation(scaled, BATCH).step(BATCH))
        torch.manual_seed(3)
        assert float(program.step(BATCH)) == pytest.approx(3 * first)


@pytest.mark.parametrize("step", STEPS)
def test_verify_sees_them(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where capture would not refuse them."""
    monkeypatch.setattr("weft.capture.tracing.runs.generators_followed", nullcontext)
    if step in (in_a_function, in_a_hook):
        assert "runs in the backward pass" in refused(step)
        return
    trained = compiled(net(), step, BATCH, [0, 1], weft.data_parallel())
    with trained as program, pytest.raises(VerificationError, match="that the step has set"):
        program.verify(BATCH)


def kept_in_python() -> float:
    state = random.getstate()
    found = random.random()
    random.setstate(state)
    return found


def kept_in_numpy() -> float:
    state = numpy.random.get_state()
    found = numpy.random.rand()
    numpy.random.set_state(state)
    return found


@pytest.mark.parametrize(
    ("draw", "line"),
    [
        (lambda: random.seed(3) or 1.0, "random.seed(3)"),
        (lambda: numpy.random.seed(3) or 1.0, "numpy.random.seed(3)"),
        (kept_in_python, "random.setstate"),
        (kept_in_numpy, "numpy.random.set_state"),
        (lambda: random.Random().random(), "random.Random()"),
        (lambda: random.SystemRandom().random(), "SystemRandom()"),
        (lambda: numpy.random.default_rng().random(), "default_rng()"),
        (lambda: numpy.random.RandomState().rand(), "RandomState()"),
        (lambda: os.urandom(1)[0], "os.urandom"),
        (lambda: secrets.randbelow(9), "randbelow"),
        (lambda: uuid.uuid4().int % 7, "uuid4"),
    ],
)
def test_random_numbers_of_python(draw: Any, line: str) -> None:
    random.seed(3)
    numpy.random.seed(3)
    message = refused(lambda model, x: squares(model, x) * draw())
    assert line in message.splitlines()[0]
    assert "draws random numbers of Python" in message


def test_random_numbers_by_a_seed_of_the_steps_own() -> None:
    def own(model: nn.Module, x: torch.Tensor) -> Any:
        by = random.Random(3).random() + numpy.random.default_rng(3).random()
        return squares(model, x) * by

    expected, _ = plain_training(net().eval(), own, [BATCH])
    with compiled(net().eval(), own, BATCH, [0, 1], weft.data_parallel()) as program:
        assert float(program.step(BATCH)) == pytest.approx(expected[0])


def test_threads_that_draw_meanwhile() -> None:
    """As those of loaders do, which load the next batch while a step is planned for another shape."""
    going, over, model = threading.Event(), threading.Event(), net()
    found = []

    def load() -> None:
        while not over.is_set():
            with drawn_by(1):
                going.set()
                found.append(random.random())
                going.wait(0.01)
                found.append(random.random())

    thread = threading.Thread(target=load)
    thread.start()
    try:
        going.wait(10)
        going.clear()
        for rows in (4, 6):
            batch = BATCH[:1].expand(rows, 8)
            with compiled(model, squares, batch, [0], weft.Strategy()) as program:
                program.step(batch)
    finally:
        over.set()
        thread.join()
    assert len(set(found)) == 2


def test_seeds_between_steps_change_nothing() -> None:
    def losses(seed: int | None) -> list[float]:
        model = net()
        with compiled(model, squares, BATCH, [0, 1], weft.data_parallel()) as program:
            found = []
            for _ in range(2):
                if seed is not None:
                    torch.manual_seed(seed)
                    weft.manual_seed(seed)
                found.append(float(program.step(BATCH)))
        weft.manual_seed(None)
        return found

    assert losses(None) == losses(5)
