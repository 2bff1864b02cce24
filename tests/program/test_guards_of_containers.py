"""Whatever lies in a container that a step reads is seen when it changes, wherever that is, and however it is read."""

from __future__ import annotations

import copy
import logging
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weft

BATCH = torch.arange(8.0).reshape(2, 4) / 8


class Held:
    """An object of the user's."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Holder:
    held: dict[str, Any]


def used(value: Any, x: torch.Tensor) -> Any:
    """A number that comes of any value."""
    if isinstance(value, float | torch.Tensor):
        return value * x
    if isinstance(value, Held):
        return value.factor * x
    if isinstance(value, dict):
        return sum(used(each, x) for each in value.values())
    if isinstance(value, list | tuple | deque):
        return sum(used(each, x) for each in value)
    return value(x)


def contents() -> dict[str, Any]:
    return {
        "number": 1.0,
        "tensor": torch.tensor(2.0),
        "function": torch.sin,
        "module": nn.Tanh(),
        "object": Held(1.0),
        "attribute": Held(2.0),
        "list": [1.0, torch.tensor(3.0)],
        "tuple": (2.0, torch.exp),
        "nested": {"inner": {"weight": 1.0}},
    }


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "number": lambda held: held.update(number=3.0),
    "tensor": lambda held: held.update(tensor=torch.tensor(5.0)),
    "function": lambda held: held.update(function=torch.cos),
    "module": lambda held: held.update(module=nn.Sigmoid()),
    "object": lambda held: held.update(object=Held(4.0)),
    "attribute": lambda held: setattr(held["attribute"], "factor", 5.0),
    "list": lambda held: held["list"].__setitem__(1, torch.tensor(7.0)),
    "tuple": lambda held: held.update(tuple=(3.0, torch.sinh)),
    "nested": lambda held: held["nested"]["inner"].update(weight=8.0),
}
BACKWARDS = tuple(name[::-1] for name in CHANGES)
PLACES = {
    "closure": "held",
    "global": "HELD",
    "class attribute": "Holder.held",
    "default argument": "given",
    "own object": "owner.held",
    "own module": "model[1].held",
    "library module": "model[0].held",
    "parameter": "model[0].bias.held",
    "optimizer group": "optimizer.param_groups[0]['held']",
}
WAYS = {
    "constant key": "sum(used(x, s) for x in ("
    + ", ".join(f"PLACE[{name!r}]" for name in CHANGES)
    + "))",
    "computed key": "sum(used(PLACE[name[::-1]], s) for name in BACKWARDS)",
    "items": "sum(used(x, s) for _, x in PLACE.items())",
    "values": "sum(used(x, s) for x in PLACE.values())",
    "iteration": "sum(used(PLACE[name], s) for name in PLACE)",
}
# The functions are made of texts: a key stands in the code, or does not, whatever the place.
TEMPLATE = """
def made(held, default, owner, optimizer):
    def loss_fn(model, batch, given=default):
        s = model(batch).square().mean()
        return s + WAY
    return loss_fn
"""


def model_and_loss(place: str, way: str, held: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A model, its optimizer and a loss function that reads `held` from its place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1), Own())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    owner = Held(1.0)
    # Elsewhere than in its place nobody finds it.
    spaces = {
        "class attribute": Holder,
        "own object": owner,
        "own module": model[1],
        "library module": model[0],
        "parameter": model[0].bias,
    }
    Holder.held = {}
    if place in spaces:
        setattr(spaces[place], "held", held)  # noqa: B010
    if place == "optimizer group":
        optimizer.param_groups[0]["held"] = held
    space = {"used": used, "Holder": Holder, "BACKWARDS": BACKWARDS}
    space |= {"HELD": held} if place == "global" else {}
    exec(TEMPLATE.replace("WAY", WAYS[way].replace("PLACE", PLACES[place])), space)
    enclosed = held if place == "closure" else None
    given = held if place == "default argument" else None
    return model, optimizer, space["made"](enclosed, given, owner, optimizer)


def plain_loss(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any) -> float:
    """Of a step in plain PyTorch."""
    optimizer.zero_grad()
    loss = loss_fn(model, BATCH)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_all_that_lies_in_a_dict_is_seen(place: str, way: str) -> None:
    held, other = contents(), contents()
    expected = model_and_loss(place, way, other)
    first = plain_loss(*expected)
    model, optimizer, loss_fn = model_and_loss(place, way, held)
    ranks = weft.placement("cpu", [0])
    program = weft.compile(model, loss_fn, optimizer, BATCH, placement=ranks)
    assert float(program.step(BATCH)) == pytest.approx(first, rel=1e-5)
    seen = program._core.variants.current.guards.changed
    for name, change in CHANGES.items():
        before = held[name]
        inner = copy.copy(before["inner"]) if name == "nested" else copy.copy(before)
        assert seen() is None, name
        change(held)
        assert seen() is not None, name
        held[name] = before
        if name == "attribute":
            before.factor = inner.factor
        elif name == "list":
            before[:] = inner
        elif name == "nested":
            before["inner"].update(inner)
    for change in CHANGES.values():
        change(held)
        change(other)
    Holder.held = other
    second = plain_loss(*expected)
    Holder.held = held
    assert float(program.step(BATCH)) == pytest.approx(second, rel=1e-5)


class Beside:
    """One step by weft and one in plain PyTorch of `loss_fn`, as often as is asked."""

    def __init__(self, loss_fn: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        self.loss_fn = loss_fn
        torch.manual_seed(0)
        self.plain, self.model = nn.Linear(4, 4), nn.Linear(4, 4)
        self.model.load_state_dict(self.plain.state_dict())
        self.other, optimizer = (
            torch.optim.SGD(each.parameters(), lr=0.01) for each in (self.plain, self.model)
        )
        ranks = weft.placement("cpu", [0])
        self.program = weft.compile(self.model, loss_fn, optimizer, BATCH, placement=ranks)

    def step(self) -> None:
        self.other.zero_grad()
        expected = self.loss_fn(self.plain, BATCH)
        expected.backward()
        self.other.step()
        found = self.program.step(BATCH)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OrderedDict(a=torch.sin, b=torch.exp),
        lambda: {"a": torch.sin, "b": torch.exp},
        lambda: SimpleNamespace(a=torch.sin, b=torch.exp),
    ],
)
def test_functions_in_another_order(make: Callable[[], Any]) -> None:
    held = make()

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        x = model(batch)
        for each in (held if isinstance(held, dict) else vars(held)).values():
            x = each(x)
        return x.square().mean()

    beside = Beside(loss_fn)
    beside.step()
    items = held if isinstance(held, dict) else vars(held)
    items["a"] = items.pop("a")
    beside.step()
    items["b"] = torch.cos
    beside.step()


@pytest.mark.parametrize(
    "make", [UserDict, lambda held: ChainMap({}, held), lambda held: SimpleNamespace(**held)]
)
def test_what_wraps_a_dict(make: Callable[[dict[str, Any]], Any]) -> None:
    held = make({"data": 1.0, "maps": torch.ones(())})

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        s = model(batch).square().mean()
        both = vars(held) if isinstance(held, SimpleNamespace) else held
        return sum(x * s for x in both.values())

    beside = Beside(loss_fn)
    beside.step()
    inner = (
        held.maps[1]
        if isinstance(held, ChainMap)
        else held.data
        if isinstance(held, UserDict)
        else vars(held)
    )
    inner["maps"] = torch.tensor(3.0)
    beside.step()
    inner["data"] = 2.0
    beside.step()


def test_items_that_a_lookup_makes() -> None:
    weights: defaultdict[str, float] = defaultdict(lambda: 1.0)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        return sum(weights[f"w{i}"] * model(batch)[:, i].square().mean() for i in range(2))

    beside = Beside(loss_fn)
    for value in (2.0, 3.0, 4.0):
        beside.step()
        weights["w1"] = value
    beside.step()


def test_members_of_sets_and_deques_in_containers() -> None:
    held: dict[str, Any] = {"set": {Held(1.0)}, "deque": deque([torch.sin], maxlen=1)}

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        s = model(batch).square().mean()
        return sum(used(x, s) for each in held.values() for x in each)

    beside = Beside(loss_fn)
    beside.step()
    next(iter(held["set"])).factor = 3.0
    beside.step()
    held["deque"].append(torch.cos)
    beside.step()
    held["set"].add(Held(2.0))
    beside.step()


def test_a_container_that_holds_itself() -> None:
    held: dict[str, Any] = {"weight": 1.0}
    held["self"] = [held]

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        return model(batch).square().mean() * held["self"][0]["wei" + "ght"]

    beside = Beside(loss_fn)
    beside.step()
    held["weight"] = 2.0
    beside.step()


def test_what_lies_beside_the_keys_in_the_code_needs_no_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "weft")
    state: dict[str, Any] = {"weight": 1.0, "history": [], "best": torch.zeros(())}

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        loss = model(batch).square().mean() * state["weight"]
        return loss * state.get("other", 1.0)

    beside = Beside(loss_fn)
    for _ in range(3):
        beside.step()
        state["history"].append(1.0)
        state["best"] = torch.ones(())
    assert not [text for text in caplog.messages if "planned the step again" in text]


def test_an_equal_tuple_needs_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weft")
    terms = {"sine": (1.0, torch.sin)}

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
        s = model(batch).square().mean()
        return sum(weight * term(s) for weight, term in terms.values())

    beside = Beside(loss_fn)
    beside.step()
    terms["sine"] = (float("1.0"), torch.sin)
    beside.step()
    assert not [text for text in caplog.messages if "planned the step again" in text]
    terms["sine"] = (2.0, torch.sin)
    beside.step()
