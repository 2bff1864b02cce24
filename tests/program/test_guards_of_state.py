"""State of Python that lies beside attributes: slots, descriptors, base classes, contexts, items nobody names."""

from __future__ import annotations

import array
import contextvars
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import weft
from beside_plain import Both, squares

VARIABLE = contextvars.ContextVar("variable", default=1.0)
WEIGHTS = {"first": 1.0, "second": 2.0}
NESTED = {"inner": {"third": 1.0}}
RECORD = {"scale": 2.0, "epoch": 0}
VALUES = array.array("d", [1.0, 2.0])


class Remembering:
    """A descriptor that holds a number for each object."""

    def __init__(self) -> None:
        self.held: dict[int, float] = {}

    def __get__(self, owner: Any, _: type | None = None) -> Any:
        return self if owner is None else self.held.get(id(owner), 1.0)

    def __set__(self, owner: Any, value: float) -> None:
        self.held[id(owner)] = value


class Above:
    __slots__ = ()
    factor = 1.0

    def scaled(self) -> float:
        return 1.0


class Meta(type):
    by = 1.0

    @property
    def factor(cls) -> float:
        return Meta.by


class Made(metaclass=Meta):
    pass


class Held(Above):
    __slots__ = ("late", "part")
    remembered = Remembering()

    def __init__(self) -> None:
        self.part = partial(multiplied, by=1.0)

    def scaled(self) -> float:
        return super().scaled() * super().factor

    def over_items(self) -> float:
        return sum(weight for _, weight in WEIGHTS.items())

    def over_inner(self) -> float:
        return sum(NESTED["inner"].values())

    def made_key(self) -> float:
        return WEIGHTS[f"{'fir'}st"]


def multiplied(x: float, by: float) -> float:
    return x * by


READ: dict[str, tuple[Callable[[Any], Any], Callable[[Any, pytest.MonkeyPatch], Any]]] = {
    "slot-that-comes": (
        lambda held: held.late if hasattr(held, "late") else 1.0,
        lambda held, _: setattr(held, "late", 3.0),
    ),
    "descriptor": (lambda held: held.remembered, lambda held, _: setattr(held, "remembered", 3.0)),
    "method-of-super": (
        lambda held: held.scaled(),
        lambda _, patch: patch.setattr(Above, "scaled", lambda self: 3.0),
    ),
    "attribute-of-super": (
        lambda held: held.scaled(),
        lambda _, patch: patch.setattr(Above, "factor", 3.0),
    ),
    "metaclass": (lambda _: Made.factor, lambda _, patch: patch.setattr(Meta, "by", 3.0)),
    "keyword-of-partial": (
        lambda held: held.part(2.0),
        lambda held, _: held.part.keywords.update(by=3.0),
    ),
    "context": (lambda _: VARIABLE.get(), lambda _, patch: VARIABLE.set(3.0)),
    "array": (lambda _: VALUES[0] + VALUES[1], lambda _, patch: VALUES.__setitem__(1, 3.0)),
    "items": (
        lambda held: held.over_items(),
        lambda _, patch: patch.setitem(WEIGHTS, "second", 3.0),
    ),
    "inner-items": (
        lambda held: held.over_inner(),
        lambda _, patch: patch.setitem(NESTED["inner"], "third", 3.0),
    ),
    "computed-key": (
        lambda held: held.made_key(),
        lambda _, patch: patch.setitem(WEIGHTS, "first", 3.0),
    ),
}


class Reading(nn.Linear):
    """Scales by what a function reads of an object, which copies of the module share."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__(8, 8)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(HELD[0])


HELD = [Held()]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    HELD[0], VALUES[1] = Held(), 2.0
    token = VARIABLE.set(1.0)
    with weft.local_world(2):
        yield
    VARIABLE.reset(token)


@pytest.fixture
def planned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Why steps were planned anew, so far."""
    caplog.set_level(logging.INFO, "weft")
    return lambda: [text for text in caplog.messages if "planned the step again" in text]


@pytest.mark.parametrize(("read", "change"), READ.values(), ids=READ)
def test_state_that_changes_between_steps_is_seen(
    read: Any, change: Any, planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(Reading(read))
    both.step()
    both.step()
    assert not planned()
    change(HELD[0], monkeypatch)
    both.step()
    both.step()
    assert len(planned()) == 1


def test_items_beside_those_that_are_named_may_change(
    planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(Reading(lambda _: RECORD["scale"]))
    both.step()
    monkeypatch.setitem(RECORD, "epoch", 1)
    both.step()
    assert not planned()
    monkeypatch.setitem(RECORD, "scale", 3.0)
    both.step()
    assert len(planned()) == 1


def test_the_default_dtype_between_steps(planned: Callable[[], list[str]]) -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        return squares(model, batch) * torch.ones(2).element_size()

    both = Both(nn.Linear(8, 8), loss_fn)
    both.step()
    before = torch.get_default_dtype()
    x = torch.ones(8, 8)
    other = torch.float64 if before == torch.float32 else torch.float32
    try:
        torch.set_default_dtype(other)
        assert both.program.step(x).item() == pytest.approx(
            squares(both.plain, x).item() * other.itemsize, rel=1e-5
        )
    finally:
        torch.set_default_dtype(before)
    assert len(planned()) == 1
