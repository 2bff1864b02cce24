"""What a step changes of Python and reads: refused; what it only writes is put back or left, and trains as ever."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import queue
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from beside_plain import Both, compiled, squares
from weft.errors import BatchError, CaptureError, UserError
from weft.program.planning import variants

STEP = 0


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with weft.local_world(2):
        yield


Loss = Callable[[Any, Any], Any]


def by_global() -> Loss:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        global STEP
        STEP += 1
        return squares(model, batch) * min(1.0, STEP / 10)

    return loss


def by_nonlocal() -> Loss:
    count = 0

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        return squares(model, batch) * count

    return loss


def by_item(held: Any, key: Any) -> Loss:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        held[key] += 1
        return squares(model, batch) * float(held[key])

    return loss


def by_branch() -> Loss:
    held = {"n": 0}

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        found = squares(model, batch)
        held["n"] += 1
        return found * 2 if held["n"] % 2 == 0 else found

    return loss


def by_threshold() -> Loss:
    """The value for the second step is that for the first one."""
    held = {"n": 0}

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        held["n"] += 1
        return squares(model, batch) * (2.0 if held["n"] > 1000 else 1.0)

    return loss


def by_global_that_is_caught() -> Loss:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        global STEP
        STEP += 1
        try:
            factor = 2.0 if STEP % 100 == 0 else 1.0
        except TypeError:
            factor = 1.0
        return squares(model, batch) * factor

    return loss


def by_length() -> Loss:
    log: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        log.append(1)
        return squares(model, batch) * len(log)

    return loss


def by_text() -> Loss:
    held = {"s": "a"}

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        held["s"] += "a"
        return squares(model, batch) * len(held["s"])

    return loss


def by_class() -> Loss:
    class Held:
        n = 0

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        Held.n += 1
        return squares(model, batch) * Held.n

    return loss


def by_function() -> Loss:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        loss.n += 1  # type: ignore[attr-defined]
        return squares(model, batch) * loss.n  # type: ignore[attr-defined]

    loss.n = 0  # type: ignore[attr-defined]
    return loss


def by_default() -> Loss:
    def counted(held: list[int] = [0]) -> int:  # noqa: B006
        held[0] += 1
        return held[0]

    return lambda model, batch: squares(model, batch) * counted()


def by_constant() -> Loss:
    held = {"n": 0}

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        held["n"] += 1
        return squares(model, batch) * torch.tensor(float(held["n"]))

    return loss


def by_call(function: Callable[[], Any]) -> Loss:
    return lambda model, batch: squares(model, batch) * function()


def by_next(iterator: Iterator[Any]) -> Loss:
    return lambda model, batch: squares(model, batch) * next(iterator)


def by_shuffle() -> Loss:
    own, order = random.Random(0), [1.0, 2.0]

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        own.shuffle(order)
        return squares(model, batch)

    return loss


def drawn() -> Loss:
    own = np.random.default_rng(0)
    return lambda model, batch: squares(model, batch) * float(own.random())


def drawn_by_python() -> Loss:
    own = random.Random(0)
    return lambda model, batch: squares(model, batch) * own.random()


def taken(held: Any, name: str) -> Loss:
    return lambda model, batch: squares(model, batch) * getattr(held, name)()


def from_queue() -> Loss:
    held: queue.Queue[float] = queue.Queue()
    for number in range(4):
        held.put(number + 1.0)
    return lambda model, batch: squares(model, batch) * held.get()


def counts_up() -> Iterator[float]:
    yield from (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (by_global, "the global STEP from 0 to 1"),
        (by_nonlocal, "count in the closure of .* from 0 to 1"),
        (lambda: by_item({"n": 0}, "n"), r"held .*\['n'\] from 0 to 1"),
        (lambda: by_item(collections.Counter(), "n"), "the number of items of held .* from 0 to 1"),
        (lambda: by_item([0], 0), r"held .*\[0\] from 0 to 1"),
        (lambda: by_item(np.zeros(1), 0), "the values of held"),
        (by_branch, r"held .*\['n'\] from 0 to 1"),
        (by_threshold, r"held .*\['n'\] from 0 to 1"),
        (by_global_that_is_caught, "the global STEP from 0 to 1"),
        (by_length, "the number of items of log .* from 0 to 1"),
        (by_text, r"held .*\['s'\] from 'a' to 'aa'"),
        (by_class, "Held.n from 0 to 1"),
        (by_function, "loss.n from 0 to 1"),
        (by_default, r"a default of .*counted\[0\] from 0 to 1"),
        (by_constant, r"held .*\['n'\] from 0 to 1"),
        (
            lambda: taken(collections.deque([1.0, 2.0, 3.0]), "popleft"),
            "the number of items of held",
        ),
        (lambda: taken({1.0, 2.0, 3.0}, "pop"), "the number of items of held"),
        (lambda: by_next(counts_up()), "iterator .*, a generator, by taking from it"),
    ],
)
def test_what_a_step_changes_and_reads_is_refused(make: Callable[[], Loss], what: str) -> None:
    with pytest.raises(CaptureError, match=f"the step changes .*{what}.* and reads it"):
        compiled(nn.Linear(8, 8), make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: by_next(itertools.count(1)),
        lambda: by_next(itertools.cycle([1.0, 2.0])),
        lambda: by_next(iter([1.0, 2.0, 3.0])),
        lambda: by_next(map(float, [1, 2, 3])),
        lambda: by_call(functools.partial(next, itertools.count(1))),
        from_queue,
        drawn,
        drawn_by_python,
        by_shuffle,
    ],
)
def test_what_gives_something_else_each_time_is_refused(make: Callable[[], Loss]) -> None:
    with pytest.raises(CaptureError, match="the step takes what it reads from"):
        compiled(nn.Linear(8, 8), make())


def only_written(kind: str) -> Loss:
    held: dict[str, Any] = {"n": 0, "log": [], "members": set(), "array": np.zeros(1), "last": None}
    count = 0

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        nonlocal count
        global STEP
        found = squares(model, batch)
        if kind == "numbers":
            held["n"] += 1
            count += 1
            STEP += 1
            held["log"].append(count)
            held["text"] = f"step {STEP}"
        elif kind == "containers":
            held["log"].append(1)
            held["members"].add(len(held))
            held["array"][0] += 1
        else:
            held["last"] = found.detach()
            held["log"].append(found.detach())
        return found * next(iter([2.0]))

    return loss


@pytest.mark.parametrize("kind", ["numbers", "containers", "tensors"])
def test_what_a_step_only_writes_changes_nothing(kind: str) -> None:
    loss = only_written(kind)
    both = Both(nn.Linear(8, 8), loss)
    held = inspect.getclosurevars(loss).nonlocals["held"]
    assert all(type(each) is int for each in (held["n"], *held["log"]))
    for _ in range(3):
        both.step()


def test_an_iterator_that_is_left_alone_may_be_near() -> None:
    iterator, other = itertools.count(1), counts_up()

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        return squares(model, batch) * (2.0 if iterator is not None and other is not None else 1.0)

    both = Both(nn.Linear(8, 8), loss)
    both.step()
    assert (next(iterator), next(other)) == (1, 1.0)


def test_a_refusal_leaves_globals_and_closures_as_they_were() -> None:
    loss = by_nonlocal()
    with pytest.raises(CaptureError, match="count"):
        compiled(nn.Linear(8, 8), loss)
    assert loss.__closure__ is not None
    assert loss.__closure__[0].cell_contents == 0


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * round(self.factor)


def test_there_are_not_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the value; batches of another shape are still planned for values that are known."""
    monkeypatch.setattr(variants, "MOST", 2)
    both = Both(Scaled())

    def give(factor: float) -> None:
        both.change(lambda model: setattr(model, "factor", factor))

    give(2.0)
    both.step()
    give(3.0)
    with pytest.raises(
        UserError, match="factor was 2.0 and is 3.0.* in the batch, as a tensor"
    ) as error:
        both.program.step(torch.ones(8, 8))
    assert not isinstance(error.value, BatchError)
    give(1.0)
    both.step()
    both.step(6)
    with pytest.raises(BatchError, match="planned for 2 shapes already"):
        both.program.step(torch.ones(4, 8))
    give(2.0)
    both.step()
