"""The whole state of an optimizer: the plain one's, for any optimizer to go on with."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from program.live_models import STRATEGIES, Net, batch, eager_step, loss_fn, twins
from single_device import adamw, assert_same_state, whole_state
from weft.errors import UserError

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def assert_same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert found["state"][number].keys() == entries.keys()
        for name, value in entries.items():
            assert type(found["state"][number][name]) is type(value)
            torch.testing.assert_close(found["state"][number][name], value, rtol=1e-8, atol=1e-12)


@every_strategy
def test_the_whole_state_is_that_of_plain_training(name: str) -> None:
    with twins(name) as both:
        before = both.program.full_optimizer_state_dict()
        assert before == both.other.state_dict()
        both.step(2)
        found = pickle.loads(pickle.dumps(both.program.full_optimizer_state_dict()))
        assert_same_states(found, both.other.state_dict())
        # It goes on, on a single device.
        alone = copy.deepcopy(both.plain)
        optimizer = adamw(alone)
        optimizer.load_state_dict(found)
        both.step()
        eager_step(alone, optimizer, batch(3))
        assert_same_state(whole_state(both.model), alone.state_dict(), 1e-9)
        # The program takes it back.
        again = both.program.full_optimizer_state_dict()
        both.optimizer.load_state_dict(again)
        both.step()
        both.program.close()
        weft.release(both.model, both.optimizer)
        assert_same_states(both.optimizer.state_dict(), both.other.state_dict())
        both.optimizer.load_state_dict(again)
        both.other.load_state_dict(copy.deepcopy(again))
        both.eager_step()
        both.check()


def test_what_is_released_is_read_as_weights_only(tmp_path: Path) -> None:
    with twins("one rank") as both:
        both.step()
        both.program.close()
        weft.release(both.model, both.optimizer)
        torch.save(both.optimizer.state_dict(), tmp_path / "states")
        found = torch.load(tmp_path / "states", weights_only=True)
        assert_same_states(found, both.optimizer.state_dict())


def test_it_is_a_copy() -> None:
    with twins("one rank") as both:
        both.step()
        found = both.program.full_optimizer_state_dict()
        kept = copy.deepcopy(found)
        both.step()
        assert_same_states(found, kept)


def test_one_of_several_optimizers_is_named() -> None:
    torch.manual_seed(0)
    model = Net().double()
    plain = copy.deepcopy(model)

    def made(model: Any) -> list[torch.optim.Optimizer]:
        momentum = torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9)
        rest = [*model.norm.parameters(), *model.last.parameters()]
        return [momentum, torch.optim.AdamW(rest, lr=0.01, eps=1e-4)]

    optimizers, others = made(model), made(plain)
    with weft.local_world(2):
        program = weft.compile(
            model, loss_fn, optimizers, batch(0), placement=weft.placement("cpu", [0, 1])
        )
        program.step(batch(1))
        loss_fn(plain, batch(1)).backward()
        for optimizer, other in zip(optimizers, others, strict=True):
            other.step()
            found = program.full_optimizer_state_dict(optimizer)
            assert_same_states(found, other.state_dict())
        for wrong in (None, others[0]):
            with pytest.raises(UserError, match="the program has 2 optimizers; name one of them"):
                program.full_optimizer_state_dict(wrong)
        program.close()


def test_a_program_without_an_optimizer_has_none() -> None:
    model = nn.Linear(6, 4)
    with weft.local_world(1):
        program = weft.compile(
            model,
            lambda model, given: model(given["x"].float()),
            None,
            batch(0),
            placement=weft.placement("cpu", [0]),
        )
        with pytest.raises(UserError, match="has 0 optimizers"):
            program.full_optimizer_state_dict()
        program.close()
