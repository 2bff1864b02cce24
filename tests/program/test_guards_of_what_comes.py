"""What comes between steps, or takes the place of something else: attributes, items, modules, functions."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from beside_plain import Both, compiled
from weft.errors import CaptureError, UserError


@pytest.fixture
def planned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Why steps were planned anew, so far."""
    caplog.set_level(logging.INFO, "weft")
    return lambda: [text for text in caplog.messages if "planned the step again" in text]


class Settings:
    """Of a class of the user's."""

    factor = 1.0


class Inner(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def flexible() -> Any:
    """A model whose classes are its own, for each test."""

    class Part(Inner):
        pass

    class OfSettings(Settings):
        pass

    class Flexible(nn.Module):
        gain = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.several, self.named = nn.ModuleList(), nn.ModuleDict({"one": Part(8, 8)})
            self.last = None
            self.register_module("norm", None)
            self.register_buffer("offset", None)
            self.numbers, self.table, self.members = [1.0], {"a": 1.0, 5: 2.0}, {1}
            self.pairs = ([1.0], {"a": 2.0})
            self.tensors, self.act = [torch.ones(8)], torch.relu
            self.config = OfSettings()

        def forward(self, x: torch.Tensor) -> Any:
            x = self.blocks(x)
            for each in (*self.several, *self.named.values()):
                x = each(x)
            x = x if self.norm is None else self.norm(x)
            x = x if self.offset is None else x + self.offset
            x = x if self.last is None else x * self.last
            x = self.act(x) * self.gain * getattr(self, "later", 1.0) * self.config.factor
            x = x * 2 if hasattr(self, "twice") else x * getattr(self.config, "more", 1.0)
            x = x * sum(self.numbers) * sum(self.table.values()) * sum(self.members)
            return self.scaled(x) * self.tensors[0] * len(self.pairs[0]) * self.pairs[1]["a"]

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5

    return Flexible()


def halved(*arguments: Any) -> torch.Tensor:
    """Of a tensor, or of a module and a tensor."""
    return arguments[-1] * 0.5


CHANGES = {
    "append": lambda m: m.blocks.append(nn.Tanh()),
    "append-to-list": lambda m: m.several.append(nn.Tanh()),
    "add-to-dict": lambda m: m.named.update({"two": nn.Tanh()}),
    "module-for-none": lambda m: setattr(m, "norm", nn.LayerNorm(8, elementwise_affine=False)),
    "list-grows": lambda m: m.numbers.append(2.0),
    "list-replaced": lambda m: setattr(m, "numbers", [3.0]),
    "list-in-tuple": lambda m: m.pairs[0].append(1.0),
    "dict-in-tuple": lambda m: m.pairs[1].update(a=3.0),
    "tensor-in-list": lambda m: m.tensors.__setitem__(0, torch.full((8,), 2.0)),
    "dict-key": lambda m: m.table.update(b=3.0),
    "dict-number": lambda m: m.table.update({7: 3.0}),
    "set-member": lambda m: m.members.add(3),
    "set-of-as-many": lambda m: (m.members.clear(), m.members.add(7)),
    "getattr": lambda m: setattr(m, "later", 3.0),
    "getattr-of-class": lambda m: setattr(type(m), "later", 3.0),
    "hasattr": lambda m: setattr(m, "twice", True),
    "getattr-of-object": lambda m: setattr(m.config, "more", 3.0),
    "class-attribute": lambda m: setattr(type(m), "gain", 3.0),
    "class-attribute-shadowed": lambda m: setattr(m, "gain", 3.0),
    "class-of-object": lambda m: setattr(type(m.config), "factor", 3.0),
    "class-of-object-shadowed": lambda m: setattr(m.config, "factor", 3.0),
    "object-replaced": lambda m: setattr(m, "config", SimpleNamespace(factor=3.0)),
    "builtin": lambda m: setattr(m, "act", torch.tanh),
    "method-of-class": lambda m: setattr(type(m), "scaled", halved),
    "method-shadowed": lambda m: setattr(m, "scaled", torch.sin),
    "forward": lambda m: setattr(m, "forward", halved_by(m)),
    "forward-of-class": lambda m: setattr(type(m), "forward", halved_model),
    "forward-of-submodule": lambda m: setattr(m.blocks[1], "forward", torch.sin),
    "forward-of-library-module": lambda m: setattr(m.blocks[0], "forward", lambda x: x * 3),
    "forward-of-base-class": lambda m: setattr(type(m.named["one"]), "forward", halved),
    "none": lambda m: setattr(m, "last", 3.0),
    "module-with-parameters-nobody-calls": lambda m: setattr(m, "other", nn.PReLU(8)),
}


def halved_by(model: Any) -> Any:
    return lambda x: model.blocks(x) * 0.5


def halved_model(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.blocks(x) * 0.25


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_comes_between_steps_counts_from_the_next_one(
    change: Callable[[Any], Any], planned: Callable[[], list[str]]
) -> None:
    torch.manual_seed(0)
    with weft.local_world(2):
        both = Both(flexible())
        both.step()
        both.step()
        assert not planned()
        both.change(change)
        both.step()
        both.step()
    assert len(planned()) == 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.blocks.append(nn.Linear(8, 8)), "blocks.2.weight is a parameter"),
        (lambda m: setattr(m, "offset", torch.full((8,), 3.0)), "offset is a buffer"),
        (lambda m: setattr(m, "norm", nn.LayerNorm(8)), "norm.weight is a parameter"),
    ],
)
def test_parameters_and_buffers_that_come_are_refused_where_they_are_read(
    change: Callable[[Any], Any], name: str
) -> None:
    with weft.local_world(2):
        both = Both(flexible())
        both.step()
        both.change(change)
        with pytest.raises(UserError, match=f"{name} that came after the step was compiled"):
            both.program.step(torch.ones(8, 8))


def test_a_function_of_a_class_of_torch(
    planned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with weft.local_world(2):
        both = Both(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        both.step()
        monkeypatch.setattr(nn.ReLU, "forward", halved)
        both.step()
    assert "ReLU.forward" in planned()[0]


def test_a_builtin_in_a_closure(planned: Callable[[], list[str]]) -> None:
    act: Any = torch.relu

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        return act(model(batch)).square().mean()

    with weft.local_world(2):
        both = Both(nn.Linear(8, 8), loss_fn)
        both.step()
        act = torch.tanh
        both.step()
    assert "act in the closure" in planned()[0]


def test_a_list_that_is_replaced_by_an_equal_one(planned: Callable[[], list[str]]) -> None:
    """It is none of what was read, and its own changes count."""
    with weft.local_world(2):
        both = Both(flexible())
        both.change(lambda model: setattr(model, "numbers", [1.0]))
        both.step()
        assert not planned()
        both.change(lambda model: model.numbers.append(1.0))
        both.step()
    assert len(planned()) == 1


class Lazy(nn.Linear):
    """Makes what it needs where there is none, in several ways."""

    shared: Any = None
    size: Any = None

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.cache: Any = None
        self.made: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.arange(8.0)
        if self.shared is None:
            self.shared = torch.ones(8)
        if not hasattr(self, "later"):
            self.later = torch.full((8,), 2.0)
        if self.size is None:
            self.size = x.shape[-1]
        if 8 not in self.made:
            self.made[8] = torch.ones(8)
        return F.linear(x, self.weight) + self.cache * self.shared * self.later * self.size


def test_what_the_step_makes_for_itself_needs_no_other_plan(
    planned: Callable[[], list[str]],
) -> None:
    with weft.local_world(2):
        both = Both(Lazy())
        for _ in range(3):
            both.step()
        assert not planned()
        both.change(lambda model: setattr(model, "size", 3.0))
        both.change(lambda model: setattr(model, "cache", torch.ones(8)))
        both.step()
        both.step()
        assert len(planned()) == 1
        both.model(torch.ones(8, 8))  # makes the rest
        both.step()
        both.model(torch.ones(8, 8))
        both.step()
    assert len(planned()) == 2


def test_a_cache_of_the_model_s_tensors_that_eager_calls_make(
    planned: Callable[[], list[str]],
) -> None:
    """It is what the step makes for itself, and none that a plan could read."""

    class Caching(nn.Linear):
        cache: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.cache is None:
                self.cache = torch.ones_like(self.weight[0])
            return super().forward(x) * self.cache

    with weft.local_world(2):
        both = Both(Caching(8, 8))
        for _ in range(3):
            both.step()
            with torch.no_grad():
                both.model(torch.ones(8, 8))
    assert not planned()


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (lambda m, x: setattr(m, "kept", x.mean()), "keeps in kept a tensor that depends on the"),
        (lambda m, x: setattr(m, "count", m.count + 1), "changes count from 0 to 1"),
    ],
)
def test_what_comes_in_a_step_and_differs_each_time_is_refused(keep: Any, words: str) -> None:
    class Keeping(nn.Linear):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = getattr(self, "kept", 0.0)
            keep(self, x)
            return super().forward(x) + before

    with weft.local_world(2), pytest.raises(CaptureError, match=words):
        compiled(Keeping(8, 8))


class Scaled:
    """Hooks that read a number of their object."""

    def __init__(self) -> None:
        self.factor = 2.0

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.factor

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * self.factor


HOOKED: dict[str, Callable[[nn.Linear, Scaled], Any]] = {
    "closure": lambda layer, by: layer.weight.register_hook(lambda g: g * by.factor),
    "method": lambda layer, by: layer.weight.register_hook(by.gradient),
    "object": lambda layer, by: layer.register_forward_hook(by),
    "inside": lambda layer, by: layer.register_full_backward_hook(
        lambda _, given, __: (given[0] * by.factor,)
    ),
}


@pytest.mark.parametrize("kind", HOOKED)
@pytest.mark.parametrize("late", [False, True])
def test_numbers_that_hooks_read(kind: str, late: bool) -> None:
    torch.manual_seed(0)
    model, by = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double(), Scaled()
    plain = copy.deepcopy(model)
    one, other = (torch.optim.SGD(x.parameters(), lr=0.1) for x in (model, plain))
    given = {"x": torch.randn(4, 8, dtype=torch.float64)}
    HOOKED[kind](plain[2], by)
    if not late:
        HOOKED[kind](model[2], by)

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = model(batch["x"]).square().mean()
        return found

    with weft.local_world(2):
        program = weft.compile(model, loss_fn, one, given, placement=weft.placement("cpu", [0, 1]))
        if late:
            HOOKED[kind](model[2], by)
        for factor in (2.0, 5.0):
            by.factor = factor
            other.zero_grad()
            loss = loss_fn(plain, given)
            loss.backward()
            other.step()
            assert program.step(given).item() == pytest.approx(loss.item(), rel=1e-9)
        torch.testing.assert_close(program.full_state_dict(), dict(plain.state_dict()))
        program.close()
