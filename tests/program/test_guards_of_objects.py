"""What objects, other modules, defaults, classes, the environment and arrays hold, and a step reads."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from beside_plain import Both, compiled, squares
from weft.errors import CaptureError

FACTOR = 1.0


class Base:
    """What a schedule inherits."""

    power = 1.0

    def raised(self) -> float:
        return self.offset + self.power  # type: ignore[attr-defined, no-any-return]


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Indexed:
    def __init__(self) -> None:
        self.by = 1.0

    def __getitem__(self, name: str) -> float:
        return self.by * FACTOR

    def __len__(self) -> int:
        return int(self.by)

    def __mul__(self, other: torch.Tensor) -> torch.Tensor:
        return self.by * other


class Schedule(Base):
    """Reads values in methods and properties, some of them several objects deep."""

    def __init__(self) -> None:
        self.value, self.offset = 2.0, 0.5
        self.inner = types.SimpleNamespace(deep=Deep(Deep(Deep(None))))
        self.table = {"a": [Deep(None)]}
        self.slotted, self.indexed = Slotted(), Indexed()
        self.unread = 1.0
        self.array = np.ones(3)
        self.read: Any = partial(self.times, 2.0)

    def weight(self) -> float:
        return self.raised() * self.value + self.level

    @property
    def level(self) -> float:
        return self.inner.deep.next.next.number

    def by_name(self, name: str) -> Any:
        return getattr(self, name)

    def listed(self) -> float:
        return sum(each.number for each in self.table["a"])

    def times(self, by: float) -> float:
        return by * self.value

    def in_global(self) -> float:
        return FACTOR

    def of_dict(self) -> Any:
        return self.__dict__["off" + "set"]

    @staticmethod
    def fixed() -> float:
        return FACTOR * 2

    @classmethod
    def of_class(cls) -> float:
        return cls.power


class Deep:
    def __init__(self, following: Any) -> None:
        self.next, self.number = following, 1.0


@dataclass
class Config:
    """With a property, a field of its own and one that is no part of the class."""

    rate: float = 1.0
    sizes: list[int] = field(default_factory=lambda: [1, 2])

    @property
    def doubled(self) -> float:
        return self.rate * 2


READ: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "method": (lambda s: s.weight(), lambda s: setattr(s, "value", 3.0)),
    "inherited-method": (lambda s: s.weight(), lambda s: setattr(s, "offset", 3.0)),
    "class-of-base": (lambda s: s.weight(), lambda s: setattr(s, "power", 3.0)),
    "property-deep": (
        lambda s: s.weight(),
        lambda s: setattr(s.inner.deep.next.next, "number", 3.0),
    ),
    "object-deep": (
        lambda s: s.weight(),
        lambda s: setattr(s.inner.deep.next, "next", Deep(None)) or number(s, 5.0),
    ),
    "computed-name": (lambda s: s.by_name("val" + "ue"), lambda s: setattr(s, "value", 3.0)),
    "in-containers": (lambda s: s.listed(), lambda s: setattr(s.table["a"][0], "number", 3.0)),
    "slots": (lambda s: s.slotted.value, lambda s: setattr(s.slotted, "value", 3.0)),
    "getitem": (lambda s: s.indexed["x"], lambda s: setattr(s.indexed, "by", 3.0)),
    "len": (lambda s: len(s.indexed), lambda s: setattr(s.indexed, "by", 3.0)),
    "mul": (lambda s: s.indexed * torch.ones(8), lambda s: setattr(s.indexed, "by", 3.0)),
    "partial": (lambda s: s.read(), lambda s: setattr(s, "value", 3.0)),
    "dict": (lambda s: s.of_dict(), lambda s: setattr(s, "offset", 3.0)),
    "global-of-method": (lambda s: s.in_global(), lambda s: factor(3.0)),
    "global-of-static": (lambda s: s.fixed(), lambda s: factor(3.0)),
    "global-of-getitem": (lambda s: s.indexed["x"], lambda s: factor(3.0)),
    "array": (lambda s: float(s.array.sum()), lambda s: s.array.__setitem__(1, 3.0)),
    "array-replaced": (lambda s: float(s.array[0]), lambda s: setattr(s, "array", np.zeros(2))),
    "array-scalar": (lambda s: float(s.value), lambda s: setattr(s, "value", np.float64(3.0))),
}


def number(schedule: Schedule, value: float) -> None:
    schedule.inner.deep.next.next.number = value


def factor(value: float) -> None:
    globals()["FACTOR"] = value


class Reading(nn.Linear):
    """Scales by what a function reads of an object."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__(8, 8)
        self.held, self.read = held, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(self.held)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    torch.manual_seed(0)


@pytest.fixture
def planned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Why steps were planned anew, so far."""
    caplog.set_level(logging.INFO, "weft")
    return lambda: [text for text in caplog.messages if "planned the step again" in text]


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with weft.local_world(2):
        yield


@pytest.mark.parametrize(("read", "change"), READ.values(), ids=READ)
def test_what_methods_of_the_user_s_objects_read(
    read: Any, change: Any, planned: Callable[[], list[str]]
) -> None:
    both = Both(Reading(Schedule(), read))
    both.step()
    both.step()
    assert not planned()
    both.change(lambda model: change(model.held))
    both.step()
    both.step()
    assert len(planned()) == 1


class Scaled(nn.Module):
    """A layer whose class holds the power; `forward` does not name the class."""

    power = 1.0

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(8, 8), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.read(self)  # type: ignore[no-any-return]

    @classmethod
    def of_class(cls) -> float:
        return cls.power


OF_CLASSES: dict[str, Callable[[Any], float]] = {
    "type": lambda s: type(s).power,
    "__class__": lambda s: s.__class__.power,
    "classmethod": lambda s: s.of_class(),
}


@pytest.mark.parametrize("read", OF_CLASSES.values(), ids=OF_CLASSES)
@pytest.mark.parametrize("owner", [Base, Scaled])
def test_attributes_of_the_class_of_an_object_or_layer(
    owner: Any, read: Any, planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(Scaled(read) if owner is Scaled else Reading(Schedule(), read))
    both.step()
    both.step()
    assert not planned()
    monkeypatch.setattr(owner, "power", 3.0)
    both.step()
    assert len(planned()) == 1


BY_TEXT: dict[str, Callable[[Any], float]] = {
    "globals": lambda _: globals()["FACTOR"],  # type: ignore[no-any-return]
    "get": lambda _: globals().get("FACTOR", 0.0),
    "eval": lambda _: eval("2 * FACTOR"),
    "modules": lambda _: vars(sys.modules[__name__])["FACTOR"],  # type: ignore[no-any-return]
    "attribute": lambda _: sys.modules[__name__].FACTOR,  # type: ignore[no-any-return]
}


@pytest.mark.parametrize("read", BY_TEXT.values(), ids=BY_TEXT)
def test_a_global_read_by_its_name_as_a_text(read: Any, planned: Callable[[], list[str]]) -> None:
    both = Both(Reading(None, read))
    both.step()
    factor(3.0)
    both.step()
    assert len(planned()) == 1


def doubled(_: Any) -> float:
    return 2.0


def test_a_function_whose_code_is_replaced(
    planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPython's autoreload does so."""
    both = Both(Reading(None, lambda held: doubled(held)))
    both.step()
    monkeypatch.setattr(doubled, "__code__", factor_of.__code__)
    both.step()
    assert len(planned()) == 1


def factor_of(_: Any) -> float:
    return FACTOR


def test_what_the_step_does_not_read_of_an_object_may_change(
    planned: Callable[[], list[str]],
) -> None:
    both = Both(Reading(Schedule(), lambda s: s.weight()))
    both.change(lambda model: setattr(model.held, "unread", 3.0))
    both.change(lambda model: setattr(model.held.slotted, "value", 3.0))
    both.change(lambda model: model.held.array.fill(3.0))
    both.step()
    assert not planned()
    assert "__getattribute__" not in vars(Schedule)


@pytest.mark.parametrize("where", ["attribute", "closure", "default", "bound"])
@pytest.mark.parametrize("change", [lambda c: setattr(c, "rate", 3.0), lambda c: c.sizes.append(7)])
def test_settings_with_a_property(
    where: str, change: Callable[[Config], Any], planned: Callable[[], list[str]]
) -> None:
    config = Config()

    def scaled(config: Config) -> float:
        return config.doubled * sum(config.sizes)

    def by_default(model: nn.Module, batch: torch.Tensor, given: Config = config) -> Any:
        return squares(model, batch) * scaled(given)

    losses = {
        "attribute": squares,
        "closure": lambda model, batch: squares(model, batch) * scaled(config),
        "default": by_default,
        "bound": partial(lambda given, model, batch: squares(model, batch) * scaled(given), config),
    }
    both = Both(Reading(config, scaled if where == "attribute" else lambda _: 1), losses[where])
    both.step()
    if where == "attribute":
        both.change(lambda model: change(model.held))
    else:
        change(config)
    both.step()
    assert len(planned()) == 1


def module_of_user() -> Any:
    """A module as a file of the user's would be, with numbers, objects and functions."""
    module: Any = types.ModuleType("settings_of_a_user")
    text = """
import types
SCALE = 2.0
TABLE = {"a": 1.0}
inner = types.ModuleType("inner_of_a_user")
inner.OTHER = 1.0
class Constants:
    RATE = 1.0
class Held:
    def __init__(self): self.value = 1.0
    def get(self): return self.value
held = Held()
def scaled(x): return x * SCALE
"""
    exec(text, vars(module))
    return module


OF_MODULES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "number": (lambda x: settings.SCALE, lambda: setattr(settings, "SCALE", 3.0)),
    "item": (lambda x: settings.TABLE["a"], lambda: settings.TABLE.update(a=3.0)),
    "global-of-function": (lambda x: settings.scaled(1.0), lambda: setattr(settings, "SCALE", 3.0)),
    "function": (lambda x: settings.scaled(1.0), lambda: setattr(settings, "scaled", thrice)),
    "module-of-module": (
        lambda x: settings.inner.OTHER,
        lambda: setattr(settings.inner, "OTHER", 3.0),
    ),
    "class": (lambda x: settings.Constants.RATE, lambda: setattr(settings.Constants, "RATE", 3.0)),
    "object": (lambda x: settings.held.get(), lambda: setattr(settings.held, "value", 3.0)),
    "made-in-the-step": (lambda x: settings.Held().get() * Maker().by(), lambda: factor(3.0)),
}
settings: Any = module_of_user()


def thrice(x: Any) -> Any:
    return x * 3


class Maker:
    """Made in the step, each time anew; it counts for itself."""

    def __init__(self) -> None:
        self.count = 0

    def by(self) -> float:
        self.count += 1
        return FACTOR * self.count


@pytest.mark.parametrize(("read", "change"), OF_MODULES.values(), ids=OF_MODULES)
def test_what_other_modules_of_the_user_hold(
    read: Any, change: Any, planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "settings", module_of_user())

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        return squares(model, batch) * read(batch)

    both = Both(nn.Linear(8, 8), loss_fn)
    both.step()
    both.step()
    assert not planned()
    change()
    both.step()
    both.step()
    assert len(planned()) == 1


REGISTRY: dict[str, Any] = {}


def imported(_: Any) -> Any:
    import settings_of_a_user as module  # type: ignore[import-not-found]  # noqa: PLC0415

    return module.SCALE


OF_VALUES: dict[str, Callable[[Any], Any]] = {
    "class-in-dict": lambda _: REGISTRY["class"].RATE,
    "class-of-argument": lambda _: rate(REGISTRY["list"][0]),
    "module-in-dict": lambda _: REGISTRY["module"].SCALE,
    "imported": imported,
    "import_module": lambda _: importlib.import_module("settings_of_a_user").SCALE,
    "sys.modules": lambda _: sys.modules["settings_of_a_user"].SCALE,
}


def rate(owner: Any) -> Any:
    return owner.RATE


@pytest.mark.parametrize("read", OF_VALUES.values(), ids=OF_VALUES)
def test_classes_and_modules_that_are_values(
    read: Any, planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of_user()
    constants = module.Constants
    monkeypatch.setitem(sys.modules, module.__name__, module)
    held = {"class": constants, "list": [constants], "module": module}
    monkeypatch.setitem(globals(), "REGISTRY", held)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        return squares(model, batch) * read(batch)

    both = Both(nn.Linear(8, 8), loss_fn)
    both.step()
    both.step()
    assert not planned()
    module.SCALE = constants.RATE = 3.0
    both.step()
    assert len(planned()) == 1


def test_a_class_in_an_attribute(
    planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(Reading(Base, lambda held: held.power))
    both.step()
    monkeypatch.setattr(Base, "power", 3.0)
    both.step()
    assert len(planned()) == 1


class Times(torch.autograd.Function):
    """Reads attributes of its class, and a global in its backward."""

    by = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * Times.by

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * Times.by * FACTOR


@pytest.mark.parametrize("change", [lambda p: p.setattr(Times, "by", 3.0), lambda p: factor(3.0)])
def test_attributes_of_a_class_of_autograd(
    change: Any, planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(nn.Linear(8, 8), lambda model, batch: Times.apply(model(batch)).square().mean())
    both.step()
    change(monkeypatch)
    both.step()
    assert len(planned()) == 1


ENVIRONMENT: dict[str, Callable[[], Any]] = {
    "item": lambda: float(os.environ["WEFT_TEST_SCALE"]),
    "get": lambda: float(os.environ.get("WEFT_TEST_SCALE", 1)),
    "getenv": lambda: float(os.getenv("WEFT_TEST_SCALE") or 1),
    "in": lambda: 3.0 if "WEFT_TEST_SCALE" in os.environ else 1.0,
}


@pytest.mark.parametrize("read", ENVIRONMENT.values(), ids=ENVIRONMENT)
@pytest.mark.parametrize("there", [True, False])
def test_variables_of_the_environment(
    read: Any, there: bool, planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_TEST_SCALE", "2")
    if not there and read is not ENVIRONMENT["item"]:  # which raises
        monkeypatch.delenv("WEFT_TEST_SCALE")
    both = Both(nn.Linear(8, 8), lambda model, batch: squares(model, batch) * read())
    both.step()
    monkeypatch.setenv("WEFT_TEST_OTHER", "2")
    both.step()
    assert not planned()
    monkeypatch.setenv("WEFT_TEST_SCALE", "5")
    both.step()
    assert len(planned()) == 1


class Gamma(nn.Module):
    """A loss of the user's own, which is no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = 2.0
        self.inner = nn.Dropout(0.0)
        self.weight = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * self.weight).square().mean() * self.gamma


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c, "gamma", 3.0),
        lambda c: setattr(c.inner, "p", 1.0),
        lambda c: setattr(c, "weight", nn.Parameter(torch.zeros(8), requires_grad=False)),
    ],
)
def test_attributes_of_a_loss_that_is_a_module(
    change: Any, planned: Callable[[], list[str]]
) -> None:
    criterion = Gamma()
    both = Both(nn.Linear(8, 8), lambda model, batch: criterion(model(batch)))
    both.step()
    assert not planned()
    change(criterion)
    both.step()
    assert len(planned()) == 1


def test_a_loss_of_torch_in_a_closure(planned: Callable[[], list[str]]) -> None:
    criterion = nn.SmoothL1Loss(beta=1.0)
    both = Both(nn.Linear(8, 8), lambda model, batch: criterion(model(batch), batch))
    both.step()
    criterion.beta = 0.1
    both.step()
    assert len(planned()) == 1


@pytest.mark.parametrize("where", [F, torch.nn.functional])
def test_a_function_of_a_library_that_is_replaced(
    where: Any, planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(nn.Linear(8, 8), lambda model, batch: F.relu(model(batch)).square().mean())
    both.step()
    monkeypatch.setattr(where, "relu", torch.sigmoid)
    both.step()
    assert len(planned()) == 1


@cache
def remembered(by: float) -> float:
    return by * FACTOR


def test_a_function_that_remembers(planned: Callable[[], list[str]]) -> None:
    remembered.cache_clear()
    both = Both(nn.Linear(8, 8), lambda model, batch: squares(model, batch) * remembered(2.0))
    both.step()
    factor(3.0)
    remembered.cache_clear()
    both.step()
    assert len(planned()) == 1


def test_an_array_whose_memory_is_a_tensor_of_the_step_is_read_live(
    planned: Callable[[], list[str]],
) -> None:
    array = np.ones(8, dtype=np.float32)
    both = Both(
        nn.Linear(8, 8),
        lambda model, batch: (model(batch) * torch.from_numpy(array)).square().mean(),
    )
    for value in (1.0, 2.0, 3.0):
        array.fill(value)
        both.step()
    assert not planned()


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (lambda s: setattr(s, "value", s.value + 1) or s.value, "value from 2.0 to 3.0"),
        (lambda s: setattr(s, "power", s.power + 1) or s.power, "power from 1.0 to 2.0"),
        (lambda s: setattr(s.slotted, "value", s.slotted.value + 1), "slotted.value from 1.0 to"),
    ],
)
def test_numbers_that_objects_count_are_refused(count: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        compiled(Reading(Schedule(), lambda s: count(s) or 1.0))


def test_what_a_step_writes_in_objects_and_does_not_read(
    planned: Callable[[], list[str]],
) -> None:
    class Log:
        def __init__(self) -> None:
            self.last, self.all = 0.0, list[Any]()

        def note(self, value: float) -> float:
            self.last = value
            self.all.append(value)
            return value

    both = Both(Reading(Log(), lambda log: log.note(2.0)))
    for _ in range(3):
        both.step()
    assert not planned()


class Counting(nn.Linear):
    """Counts its calls, by several ways to begin."""

    begun: Any = None

    def __init__(self, how: str) -> None:
        super().__init__(8, 8)
        self.how, self.holder = how, types.SimpleNamespace(made=Slotted())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "getattr":
            self.count = getattr(self, "count", 0) + 1
        elif self.how == "hasattr":
            if not hasattr(self, "count"):
                self.count = 0
            self.count += 1
        elif self.how == "none":
            self.begun = (self.begun or 0) + 1
        else:
            self.size = getattr(self, "size", 0) or x.shape[-1]
        return super().forward(x) * (getattr(self, "count", 1) + (self.begun or 0))


@pytest.mark.parametrize("how", ["getattr", "hasattr", "none"])
def test_a_number_that_a_step_counts_up_from_nothing_is_refused(how: str) -> None:
    model = Counting(how)
    with pytest.raises(CaptureError, match="the step changes (count|begun) from 1 to 2, and reads"):
        compiled(model)
    assert {"count", "begun"}.isdisjoint(vars(model))


def test_a_number_that_a_step_makes_once(planned: Callable[[], list[str]]) -> None:
    both = Both(Counting("size"))
    both.step()
    both.step()
    assert not planned()
    assert "size" not in vars(both.model)
