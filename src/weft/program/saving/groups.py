"""The part of a checkpoint that is no tensor: options of its parameter groups, steps made, seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from weft.capture.optimizers.groups import Optimizers
from weft.errors import DamagedCheckpoint, UserError
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
    steps, saved = about.get("steps", 0), about.get("groups", [])
    lists = isinstance(saved, list) and all(isinstance(each, list) for each in saved)
    if not _is_number(steps) or not isinstance(steps, int) or steps < 0 or not lists:
        raise DamagedCheckpoint(
            "weft.json is damaged: its steps or groups are none; load another checkpoint"
        )
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


def options_of(about: Mapping[str, Any], optimizers: Optimizers) -> list[list[dict[str, Any]]]:
    """The options of parameter groups that were saved, by optimizer.

    Raises:
        DamagedCheckpoint: one is no value that the option may have.
    """
    found: list[list[dict[str, Any]]] = []
    for i, groups in enumerate(about.get("groups", ())):
        found.append([])
        for n, saved in enumerate(groups):
            options = from_json(saved, f"{_GROUP}.{i}.{n}", {})
            now = optimizers.each[i].param_groups[n] if optimizers else {}
            for name, value in options.items() if isinstance(options, dict) else [("", None)]:
                if not name or (name in now and not _fits(value, now[name])):
                    raise DamagedCheckpoint(
                        f"the option {name!r} of parameter group {n} is saved as {value!r}; load another checkpoint"
                    )
            found[-1].append(options)
    return found


def _fits(value: Any, now: Any) -> bool:
    """True where an option may have a value: of the kind of the one that it has."""
    if value is None and isinstance(now, Tensor):
        return False
    if value is None or now is None or isinstance(now, bool):
        return value is None or now is None or isinstance(value, bool)
    if isinstance(now, Real | Tensor):
        return _is_number(value)
    if isinstance(now, tuple | list):
        return (
            isinstance(value, tuple | list)
            and len(value) == len(now)
            and all(map(_fits, value, now))
        )
    return type(value) is type(now)


def _is_number(value: Any) -> bool:
    """True for numbers that a tensor can hold."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def put_options(groups: Sequence[Sequence[Mapping[str, Any]]], optimizers: Optimizers) -> None:
    """Give parameter groups the options that were saved."""
    for optimizer, saved in zip(optimizers.each, groups, strict=False):
        for group, options in zip(optimizer.param_groups, saved, strict=True):
            for name, value in options.items():
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
