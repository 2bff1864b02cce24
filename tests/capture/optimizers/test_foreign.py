"""Optimizers of the user's own: an update that goes by what copies lack is refused, what copies are given is not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.capture.optimizer_groups import Optimizers
from weft.capture.optimizers.attributes import (
    attributes_of,
    check_optimizer,
    give_attributes,
    unshared_copy,
)
from weft.capture.optimizers.optimizer import UpdateRule, groups_of, update_rules
from weft.errors import CaptureError

# `update(optimizer, parameter, group, state, number)`: what a step does to one parameter, by how much it goes.
Update = Callable[[Any, torch.Tensor, dict[str, Any], dict[str, Any], int], Any]


class Own(torch.optim.Optimizer):
    """Goes against the gradient, by as much as a function says.

    Args:
        parameters: of a model, or groups of them.
        update: says by how much.
        attributes: of the optimizer.
    """

    def __init__(self, parameters: Any, update: Update, **attributes: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.update = update
        vars(self).update(attributes)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * self.update(self, p, group, self.state[p], number) * p.grad
                number += 1


def rules(update: Update, groups: int = 1, **attributes: Any) -> dict[str, UpdateRule]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    every = list(model.parameters())
    parts = [{"params": every[number::groups]} for number in range(groups)]
    made: Any = Own(parts, update, **attributes)
    if "model" in attributes:
        made.model = model
    if "special" in attributes:
        made.special = attributes["special"](every[0])
    parameters, optimizers = dict(model.named_parameters()), Optimizers((made,))
    for each in optimizers.each:
        check_optimizer(each)
    return update_rules(optimizers, parameters, groups_of(optimizers, parameters))


def counted(o: Any, p: Any, group: Any, state: Any, number: int) -> Any:
    o.calls += 1
    return 1 / o.calls


def counted_in_a_state(o: Any, p: Any, group: Any, state: Any, number: int) -> Any:
    o.state["calls"] = o.state.get("calls", 0) + 1
    return 1 / o.state["calls"]


def counted_in_a_tensor(o: Any, p: Any, group: Any, state: Any, number: int) -> Any:
    o.calls.add_(1)
    return 1 / o.calls


def counted_in_a_list(o: Any, p: Any, group: Any, state: Any, number: int) -> Any:
    o.calls.append(number)
    return 1 / len(o.calls)


def rare(o: Any, p: Any, group: Any, state: Any, number: int) -> Any:
    o.calls += 1
    return 1 if o.calls % 100 else 0


def queued(o: Any, p: Any, group: Any, state: Any, number: int) -> Any:
    state.setdefault("last", deque(maxlen=2)).append(p.grad.clone())
    return 1


SEEN = ["depends on its place among the parameters and groups"]
KEPT = [
    "depends on self.calls, which its step changes in the optimizer itself",
    "self.state[param]",
]


@pytest.mark.parametrize(
    ("update", "attributes", "words"),
    [
        (lambda o, p, g, s, n: torch.rand_like(p), {}, ["draws random numbers", "aten.rand_like"]),
        (lambda o, p, g, s, n: 1 + n, {}, SEEN),
        (lambda o, p, g, s, n: len(g["params"]), {}, SEEN),
        (lambda o, p, g, s, n: 1 + (g is o.param_groups[0]), {"groups": 2}, SEEN),
        (lambda o, p, g, s, n: o.param_groups[0]["lr"], {"groups": 2}, SEEN),
        (counted, {"calls": 0}, KEPT),
        (rare, {"calls": 0}, KEPT),
        (counted_in_a_list, {"calls": []}, KEPT),
        (counted_in_a_tensor, {"calls": torch.zeros(())}, KEPT),
        (counted_in_a_state, {}, ["keeps self.state['calls'], which belongs to no parameter"]),
        (queued, {}, ["its state 'last' is a deque"]),
        (lambda o, p, g, s, n: 1, {"model": None}, ["holds a model in its attribute 'model'"]),
        (
            lambda o, p, g, s, n: 2 if id(p) in o.special else 1,
            {"special": lambda p: {id(p)}},
            ["holds the id of a parameter in its attribute 'special'"],
        ),
        (
            lambda o, p, g, s, n: o.special.get(p, 1),
            {"special": lambda p: {p: 2}},
            ["holds parameters in its attribute 'special'"],
        ),
    ],
)
def test_an_update_that_goes_by_what_copies_lack_is_refused(
    update: Update, attributes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        rules(update, **attributes)
    assert all(
        word in str(caught.value) for word in ["the optimizer Own cannot be captured", *words]
    )


def test_numbers_from_elsewhere_are_refused() -> None:
    drawn = iter(range(10**9))
    with pytest.raises(CaptureError, match="gives another result when it runs again"):
        rules(lambda o, p, g, s, n: 1 + next(drawn) % 7)


def cached(o: Any, p: Any, group: Any, state: Any, number: int) -> Any:
    """As the first RAdam: what depends on the number of the step alone is kept in a table of the optimizer."""
    state["step"] = state.get("step", 0) + 1
    place = o.table[state["step"] % 4]
    if place[0] != state["step"]:
        place[:] = state["step"], 1 / state["step"]
    return place[1]


def by_group(o: Any, p: Any, group: Any, state: Any, number: int) -> Any:
    """As AdaBound: a rate for each group of the user's, of which there is one."""
    rates = {id(each): rate for each, rate in zip(o.param_groups, o.rates, strict=False)}
    return rates.get(id(group), 0.0)


def noted(o: Any, p: Any, group: Any, state: Any, number: int) -> Any:
    o.last = float(p.grad.norm()) if not p.is_meta else 0.0
    return 1


@pytest.mark.parametrize(
    ("update", "attributes"),
    [
        (lambda o, p, g, s, n: 2.0 if isinstance(p, nn.Parameter) and p.requires_grad else 1.0, {}),
        (lambda o, p, g, s, n: getattr(p, "scale", 1.0), {}),
        (lambda o, p, g, s, n: o.scale, {"scale": 3.0}),
        (cached, {"table": [[None, None] for _ in range(4)]}),
        (noted, {}),
        (by_group, {"rates": [2.0]}),
    ],
)
def test_an_update_by_what_copies_have_is_captured(
    update: Update, attributes: dict[str, Any]
) -> None:
    found = rules(update, **attributes)
    assert len(found) == 4
    assert all(rule.elementwise for rule in found.values())
    assert attributes.get("table", [[None, None]])[0] == [None, None]  # a trial leaves nothing


def test_a_scheduler_may_put_its_step_on_an_optimizer() -> None:
    model = nn.Linear(4, 3)
    made = Own(model.parameters(), lambda o, p, g, s, n: 1)
    torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    parameters, optimizers = dict(model.named_parameters()), Optimizers((made,))
    assert len(update_rules(optimizers, parameters, groups_of(optimizers, parameters))) == 2


def test_parameters_of_one_shape_with_other_attributes_are_tried_apart() -> None:
    def update(o: Any, p: Any, group: Any, state: Any, number: int) -> Any:
        if getattr(p, "mean", None) is True:
            return p.grad.mean()
        return 1

    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight.mean = True  # type: ignore[assignment, method-assign]
    parameters = dict(model.named_parameters())
    optimizers = Optimizers((Own(model.parameters(), update),))
    found = update_rules(optimizers, parameters, groups_of(optimizers, parameters))
    assert [rule.elementwise for rule in found.values()] == [True, False]


def test_containers_are_copied_and_attributes_given() -> None:
    given: dict[str, Any] = {"table": [[1], deque([2])], "names": {"a"}, "by": {"x": [3]}}
    found = unshared_copy(given)
    assert found == given
    assert found["table"][0] is not given["table"][0]
    assert found["by"]["x"] is not given["by"]["x"]
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    one.scale, other.old = 2.0, True  # type: ignore[attr-defined]
    give_attributes(other, attributes_of(one))
    assert vars(other) == {"scale": 2.0}
