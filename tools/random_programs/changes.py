"""What users do to a model between two steps; the same is done to the live model and to the plain one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# "held": the step updates nothing, what it leaves in `grad` is used afterwards. "verified": the step is
# checked before. "moved": from here on the program is another one, of another strategy.
CHANGES = ("frozen", "evaluating", "written", "reloaded", "held", "verified", "moved")


@contextmanager
def changed(
    name: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Change something for one step: what is trained, the mode, values, or nothing but where values stand."""
    trained = [p for p in model.parameters() if p.requires_grad]
    match name:
        case "frozen":
            for parameter in trained[:-2:2]:
                parameter.requires_grad_(False)
        case "evaluating":
            model.eval()
        case "written":
            _write(model)
        case "reloaded":
            every: list[Any] = [model, *optimizers]
            kept = copy.deepcopy([each.state_dict() for each in every])
            _write(model)
            for each, state in zip(every, kept, strict=True):
                each.load_state_dict(state)
    yield
    for parameter in trained:
        parameter.requires_grad_(True)
    model.train()


def _write(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
