"""The part of a checkpoint that is no tensor: options of its parameter groups, steps made, seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.capture.optimizers.groups import Optimizers
from weft.errors import UserError
from weft.ir.logical import Call
from weft.program.saving.program_state import ProgramState
from weft.program.saving.values import from_json, to_json
from weft.version import __version__

_GROUP = "group"


def about_program(state: ProgramState, steps: int, optimizers: Optimizers) -> dict[str, Any]:
    """All but the tensors of a program that has made so many steps, as JSON."""
    return {
        "weft": __version__,
        "torch": torch.__version__,
        "steps": steps,
        "seed": state.setting.seed,
        "ranks": len(state.setting.placement.ranks),
        "groups": [
            [_options(group, i, n) for n, group in enumerate(each.param_groups)]
            for i, each in enumerate(optimizers.each)
        ],
    }


def check_program(about: Mapping[str, Any], state: ProgramState, optimizers: Optimizers) -> None:
    """Check that a checkpoint is of a program with the same parameter groups, and the seed where that matters.

    Raises:
        UserError: it is of another.
    """
    saved = about.get("groups", [])
    if saved and optimizers:
        own = [len(each.param_groups) for each in optimizers.each]
        if [len(each) for each in saved] != own:
            raise UserError(
                f"the checkpoint has {[len(each) for each in saved]} parameter groups by optimizer, the program {own}; "
                "load it with the optimizers that were saved"
            )
    seed = about.get("seed", state.setting.seed)
    if seed != state.setting.seed and optimizers and _draws(state):
        raise UserError(
            f"the checkpoint's random ops draw by seed {seed}, the program's by {state.setting.seed}; compile with "
            f"seed={seed}, so that the run goes on as it would have"
        )


def put_options(about: Mapping[str, Any], optimizers: Optimizers) -> None:
    """Give parameter groups the options that were saved."""
    if not about.get("groups"):
        return
    for i, (optimizer, groups) in enumerate(zip(optimizers.each, about["groups"], strict=True)):
        for n, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            for name, value in from_json(saved, f"{_GROUP}.{i}.{n}", {}).items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value


def _options(group: Mapping[str, Any], optimizer: int, number: int) -> Any:
    plain = {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    return to_json(plain, f"{_GROUP}.{optimizer}.{number}", {})


def _draws(state: ProgramState) -> bool:
    return any(
        call.op.startswith("weft.") and "uniform" in call.op for call in state.graph.of_kind(Call)
    )
