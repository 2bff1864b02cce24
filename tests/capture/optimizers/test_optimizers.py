"""Updates are one composite node each: states, group and element-wise or not are found by running the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import models
from weft.capture import capture
from weft.ir.logical import Input, Update

ADAM = ["step", "exp_avg", "exp_avg_sq"]


def updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Update], Any]:
    batch = models.vector_batch(dtype=torch.float32)
    graph = capture(model, models.classification_loss, optimizer, batch).graph
    return graph.of_kind(Update), graph


@pytest.mark.parametrize(
    ("name", "options", "states", "elementwise"),
    [
        ("SGD", {}, [], True),
        ("SGD", {"momentum": 0.9, "nesterov": True}, ["momentum_buffer"], True),
        ("Adam", {}, ADAM, True),
        ("AdamW", {"amsgrad": True}, [*ADAM, "max_exp_avg_sq"], True),
        ("AdamW", {"fused": True}, ADAM, True),
        ("AdamW", {"foreach": True}, ADAM, True),
        ("Adam", {"lr": torch.tensor(1e-3)}, ADAM, True),
        ("NAdam", {}, ["step", "mu_product", "exp_avg", "exp_avg_sq"], True),
        ("RMSprop", {"momentum": 0.1}, ["step", "square_avg", "momentum_buffer"], True),
        ("Adagrad", {}, ["step", "sum"], True),
        ("ASGD", {}, ["step", "eta", "mu", "ax"], True),
        ("Rprop", {}, ["step", "prev", "step_size"], True),
        ("Adafactor", {}, ["step", "row_var", "col_var"], False),
    ],
)
def test_states(name: str, options: dict[str, Any], states: list[str], elementwise: bool) -> None:
    model = models.MLP()
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    found, graph = updates(model, optimizer)
    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    first = found[0]
    assert (first.rule, keys[first.target.name], first.group) == (name, "hidden.weight", 0)
    assert [keys[ref.name] for ref in first.states] == [f"hidden.weight.{s}" for s in states]
    assert first.elementwise is elementwise
    assert len(found) == 4


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"momentum": 0.9}), ("AdamW", {}), ("NAdam", {}), ("Adafactor", {})],
)
def test_a_users_default_device_changes_nothing(name: str, options: dict[str, Any]) -> None:
    """Also where it holds no values: what looks at values makes its own."""
    model = models.MLP()
    expected, _ = updates(model, getattr(torch.optim, name)(model.parameters(), **options))
    model = models.MLP()
    batch = models.vector_batch(dtype=torch.float32)
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    with torch.device("meta"):
        graph = capture(model, models.classification_loss, optimizer, batch).graph
    assert graph.of_kind(Update) == expected


def test_shapes_and_dtypes_of_states() -> None:
    model = models.MLP()
    _, graph = updates(model, torch.optim.AdamW(model.parameters()))
    states = {n.key: n.value for n in graph.of_kind(Input) if n.role == "state"}
    assert states["head.weight.exp_avg"].shape == (4, 16)
    assert (states["head.weight.step"].shape, states["head.weight.step"].dtype) == ((), "float32")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_an_update_that_multiplies_matrices_is_not_elementwise() -> None:
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False))
    found, _ = updates(model, torch.optim.Muon(model.parameters()))
    assert [node.elementwise for node in found] == [False, False]


def test_groups_frozen_and_absent_parameters() -> None:
    model = models.MLP()
    model.head.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [
            {"params": [model.head.weight, model.head.bias], "lr": 0.1},
            {"params": [model.hidden.bias]},
        ],
        lr=0.2,
        momentum=0.9,
    )
    found, graph = updates(model, optimizer)
    assert {(u.target.name, u.group) for u in found} == {("head.weight", 0), ("hidden.bias", 1)}
    assert sum(node.role == "state" for node in graph.of_kind(Input)) == 2


def test_options_that_are_no_number() -> None:
    model = models.MLP()
    found, _ = updates(model, torch.optim.SGD(model.parameters(), lr=float("nan")))
    assert len(found) == len(list(model.parameters()))


def test_tied_weights_are_updated_once() -> None:
    model = models.GPT(tied=True)
    optimizer = torch.optim.Adam(model.parameters())
    graph = capture(model, models.token_loss, optimizer, models.token_batch()).graph
    targets = [update.target.name for update in graph.of_kind(Update)]
    assert targets.count("tokens.weight") == 1
    assert "head.weight" not in targets


def test_schedules_and_states_of_the_user_stay_untouched() -> None:
    model = models.MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    before = repr(optimizer.state_dict()), repr(schedule.state_dict())
    found, _ = updates(model, optimizer)
    assert len(found) == 4
    assert (repr(optimizer.state_dict()), repr(schedule.state_dict())) == before
    assert all(parameter.grad is None for parameter in model.parameters())


class Halving(torch.optim.Optimizer):
    """An optimizer of the user's own, with a number and a tensor as state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["calls"] = state.get("calls", 0) + 1
                state["last"] = p.grad.clone() if group["lr"] else None
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def test_an_optimizer_of_the_users_own() -> None:
    model = models.MLP()
    found, _ = updates(model, Halving(model.parameters()))
    assert (found[0].rule, found[0].elementwise) == ("Halving", False)
    assert [ref.name for ref in found[0].states] == ["hidden.weight.last"]


class ByWidth(torch.optim.Optimizer):
    """Asks for the parameter's shape, in ops that are all element-wise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / p.shape[-1])


def test_an_update_by_the_shape_of_its_parameter_is_not_elementwise() -> None:
    model = models.MLP()
    found, _ = updates(model, ByWidth(model.parameters()))
    assert not any(node.elementwise for node in found)


@pytest.mark.parametrize(("name", "elementwise"), [("Rprop", True), ("Adafactor", False)])
def test_parameters_of_one_element(name: str, elementwise: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 1), nn.PReLU(1), nn.Linear(1, 4))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return (model(batch["x"]) * model.scale).square().mean()

    optimizer = getattr(torch.optim, name)(model.parameters())
    batch = {"x": torch.randn(6, 8)}
    graph = capture(model, loss_fn, optimizer, batch).graph
    shapes = {node.value.name: node.value.shape for node in graph.of_kind(Input)}
    found = graph.of_kind(Update)
    assert len(found) == 6
    assert all(u.elementwise is elementwise for u in found if shapes[u.target.name])
    states = {node.key: node.value.shape for node in graph.of_kind(Input) if node.role == "state"}
    assert states["scale.step"] == ()
    assert states.get("scale.prev", ()) == ()
