"""Facts of a step that its plan on one device does not say: what is trained, and what the user says of layouts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

import weft
from search.jobs import dense, layers, loss
from weft.planning.machine import machine_of
from weft.planning.stored_step import StoredStep
from weft.search.steps.facts import StepFacts


def facts(step: StoredStep) -> StepFacts:
    return StepFacts(step, machine_of("h100x2"), weft.Strategy())


def step(model: nn.Module) -> StoredStep:
    batch = {"x": torch.zeros(8, 16), "y": torch.zeros(8, dtype=torch.int64)}
    trained = [each for each in model.parameters() if each.requires_grad]
    return weft.Job(model, loss, torch.optim.AdamW(trained), batch).stored()


def test_what_is_frozen_is_not_updated() -> None:
    model = dense(16, 32, 4)
    model[0].requires_grad_(False)
    found, last = facts(step(model)), 4 * (32 * 4 + 4)
    assert found.trained == last
    assert found.parameters == last + 4 * (16 * 32 + 32)
    # AdamW's two moments, and a number of steps for each.
    assert found.updated == 3 * last + 2 * 4


class Hinted(nn.Module):
    """A layer on activations that the code lays out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(weft.hint(x, sbp=weft.broadcast))
        return made


def test_a_hint_in_the_code_guides_as_the_strategy_does() -> None:
    free = facts(layers())
    assert not free.guided
    assert replace(free, base=weft.Strategy(batch={"*": weft.split(0)})).guided
    assert facts(step(Hinted())).guided
