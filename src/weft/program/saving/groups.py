"""The part of a checkpoint that is no tensor: options of its parameter groups, steps made, seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.capture.optimizer_groups import Optimizers
from weft.errors import UNREADABLE, DamagedCheckpoint, UserError
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
        "optimizers": _trained(state, optimizers),
    }


def _trained(state: ProgramState, optimizers: Optimizers) -> list[list[Any]]:
    """Of each optimizer its class, and the names of the parameters of each of its groups."""
    names = {id(x): key for key, x in state.setting.model.named_parameters()}
    return [
        [
            type(each).__name__,
            [
                sorted(names[id(p)] for p in group["params"] if id(p) in names)
                for group in each.param_groups
            ],
        ]
        for each in optimizers.each
    ]


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
        _check_trained(about, _trained(state, optimizers))
    seed = about.get("seed", state.setting.seed)
    calls = state.graph.of_kind(Call)
    draws = any(call.op.startswith("weft.") and "uniform" in call.op for call in calls)
    if seed != state.setting.seed and optimizers and draws:
        raise UserError(
            f"the checkpoint's random ops draw by seed {seed}, the program's by {state.setting.seed}; compile with "
            f"seed={seed}, so that the run goes on as it would have"
        )


def _check_trained(about: Mapping[str, Any], own: list[list[Any]]) -> None:
    """Check that optimizers are those that were saved: states and options are of their parameters."""
    saved = about.get("optimizers", own)
    try:
        for (kind, groups), (own_kind, own_groups) in zip(saved, own, strict=True):
            if kind != own_kind:
                raise UserError(
                    f"the checkpoint is of the optimizer {kind}, the program has {own_kind}; load it with the "
                    "optimizer that was saved, or the model alone (model_only=True)"
                )
            for number, (names, own_names) in enumerate(zip(groups, own_groups, strict=True)):
                others = sorted(set(names) ^ set(own_names))
                if others:
                    where = "checkpoint" if others[0] in names else "program"
                    raise UserError(
                        f"parameter group {number} of {kind} is another one in the checkpoint: {others[0]} is in that "
                        f"of the {where} alone; load it with the optimizers that were saved, in the same groups, or "
                        "the model alone (model_only=True)"
                    )
    except UserError:
        raise
    except UNREADABLE as error:
        raise DamagedCheckpoint(
            f"weft.json is damaged: its optimizers are none: {type(error).__name__}; load another checkpoint"
        ) from None


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
    if isinstance(now, np.generic):
        now = now.item()
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
                group[name] = _put(value, group.get(name))


def _put(value: Any, now: Any) -> Any:
    """An option that was saved, in the tensors that hold it now, where some do."""
    if isinstance(now, Tensor):
        return now.fill_(value)
    if isinstance(now, list | tuple) and any(isinstance(each, Tensor) for each in now):
        every = [_put(each, own) for each, own in zip(value, now, strict=True)]
        return every if isinstance(now, list) else tuple(every)
    return value


def _options(group: Mapping[str, Any], optimizer: int, number: int) -> Any:
    plain = {
        name: _without_tensors(value, f"the option {name!r} of parameter group {number}")
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    return to_json(plain, f"{_GROUP}.{optimizer}.{number}", {})


def _without_tensors(value: Any, what: str) -> Any:
    """An option as a checkpoint has it: the number in the place of a tensor of one element, also of one in a list.

    Raises:
        UserError: a tensor has more, for which there is no place among options.
    """
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_meta:
            return value.item()
        raise UserError(
            f"{what} is or holds a tensor of shape {list(value.shape)}; a checkpoint takes numbers, texts, lists and "
            "dicts of them there, and tensors of one element: give its values as a list, value.tolist()"
        )
    if isinstance(value, list | tuple):
        every = [_without_tensors(each, what) for each in value]
        return every if isinstance(value, list) else tuple(every)
    if isinstance(value, dict):
        return {name: _without_tensors(each, what) for name, each in value.items()}
    return value
