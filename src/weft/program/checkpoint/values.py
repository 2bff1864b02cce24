"""The part of a checkpoint without tensors: Python values as JSON, options of parameter groups, steps, seed.

Values are restored exactly; none of them is ever executed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from weft.capture.optimizer_groups import Optimizers
from weft.errors import UNREADABLE, DamagedCheckpoint, UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Call
from weft.layout import Partial
from weft.ops.cost import dtype_name
from weft.program.checkpoint.manifest import DTYPES
from weft.program.setting import ProgramSetting
from weft.tensor import GlobalTensor
from weft.version import __version__

# Marks a dict that stands for a value that JSON has not.
_KIND = "__weft__"
_MOST_DEEP = 64
# Bits of whole numbers: Python reads no longer ones from a text.
_MOST_BITS = 14_000
# For a number of numpy that Python's hold as it is.
_MOST_BYTES = 8
# How the names of the options of parameter groups begin.
_GROUP = "group"
_DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}


def to_json(value: Any, where: str, tensors: dict[str, Tensor], deep: int = 0) -> Any:
    """A value as JSON; tensors in it go into `tensors`, each under its own name.

    Args:
        value: None, truth values, numbers, texts, bytes, plain and global tensors, and lists, tuples, sets and dicts
            of these; numpy's numbers come back as Python's.
        where: the value's place, for errors and names.
        tensors: that were met.

    Raises:
        UserError: naming a value of another type, or a tensor that is not plain.
    """
    if deep > _MOST_DEEP:
        raise UserError(
            f"{where} is nested more than {_MOST_DEEP} deep, the most that a checkpoint can hold"
        )

    def inner(each: Any, name: object) -> Any:
        return to_json(each, f"{where}.{name}", tensors, deep + 1)

    match value:
        case Tensor():
            check_plain(value, where)
            root, _, path = where.partition(".")
            # Global tensors have the same name whatever other tensors a process has.
            laid = isinstance(value, GlobalTensor)
            name = f"{root}.laid.{path}" if laid else f"{root}.{len(tensors)}"
            while name in tensors:
                name += "_"
            tensors[name] = value
            return {_KIND: "tensor", "name": name}
        case list():
            return [inner(each, number) for number, each in enumerate(value)]
        case tuple() | set() | frozenset():
            kind = "tuple" if isinstance(value, tuple) else type(value).__name__
            # Texts have another order in the set of each process.
            every = value if kind == "tuple" else sorted(value, key=repr)
            return {_KIND: kind, "value": [inner(each, i) for i, each in enumerate(every)]}
        case dict() if all(type(key) is str for key in value) and _KIND not in value:
            return {key: inner(each, key) for key, each in value.items()}
        case dict():
            pairs = [[inner(key, "key"), inner(each, key)] for key, each in value.items()]
            return {_KIND: "dict", "value": pairs}
    return _single(value, where)


def _single(value: Any, where: str) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int() if int(value).bit_length() <= _MOST_BITS:
            return int(value)
        case int():
            raise UserError(
                f"{where} is a number of {int(value).bit_length()} bits; a checkpoint can hold whole numbers of at "
                f"most {_MOST_BITS}: give it as text, or as bytes"
            )
        case float():
            plain = float(value)
            return plain if math.isfinite(plain) else {_KIND: "float", "value": repr(plain)}
        case np.bool_() | np.integer():
            return value.item()
        case np.floating() if value.dtype.itemsize <= _MOST_BYTES:
            return _single(value.item(), where)
        case complex():
            return {_KIND: "complex", "value": [repr(value.real), repr(value.imag)]}
        case bytes():
            return {_KIND: "bytes", "value": value.hex()}
        case torch.dtype():
            return {_KIND: "dtype", "value": str(value).removeprefix("torch.")}
    raise UserError(
        f"{where} is a {type(value).__name__}; a checkpoint can hold numbers, texts, tensors, and lists and dicts of "
        "them, or an object with state_dict() and load_state_dict()"
    )


def from_json(value: Any, where: str, tensors: dict[str, Tensor], deep: int = 0) -> Any:
    """The value that `to_json` was given; raises UserError, naming what is none that it makes."""
    if deep > 2 * _MOST_DEEP:
        raise DamagedCheckpoint(
            f"{where} is damaged: it is nested too deep; load another checkpoint"
        )

    def inner(each: Any, name: object) -> Any:
        return from_json(each, f"{where}.{name}", tensors, deep + 1)

    if isinstance(value, list):
        return [inner(each, number) for number, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: inner(each, key) for key, each in value.items()}
    try:
        return _special(value, inner, tensors)
    except UNREADABLE as error:
        raise DamagedCheckpoint(f"{where} is damaged: {type(error).__name__}: {error}") from None


def _special(value: dict[str, Any], inner: Any, tensors: dict[str, Tensor]) -> Any:
    content = value.get("value")
    match value[_KIND]:
        case "float":
            return float(content)  # type: ignore[arg-type]
        case "complex":
            real, imaginary = content  # type: ignore[misc]
            return complex(float(real), float(imaginary))
        case "bytes":
            return bytes.fromhex(content)  # type: ignore[arg-type]
        case "tensor":
            return tensors[value["name"]]
        case "dtype":
            return _DTYPES[content]  # type: ignore[index]
        case "tuple" | "set" | "frozenset" as kind:
            every = [inner(each, number) for number, each in enumerate(content)]  # type: ignore[arg-type]
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](every)
        case "dict":
            return {inner(key, "key"): inner(each, key) for key, each in content}  # type: ignore[union-attr]
    raise ValueError(f"no kind {value[_KIND]!r}")


def check_plain(tensor: Tensor, where: str) -> None:
    """Raise UserError, saying what would do, for a tensor that no checkpoint can hold; it is at `where`."""
    if why := _why_not(tensor):
        raise UserError(
            f"{where} is {why[0]}; a checkpoint can hold dense tensors with values: {why[1]}"
        )


def _why_not(tensor: Tensor) -> tuple[str, str] | None:
    """The kind of a tensor that cannot be saved, and what would do; None for one that can."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "a parameter without a shape", "run its lazy module once before"
    if tensor.is_nested:
        return "a nested tensor", "give the list of its parts, tensor.unbind()"
    kind = f"of shape {list(tensor.shape)}"
    if isinstance(tensor, DTensor):
        return f"a DTensor {kind}", "give tensor.full_tensor()"
    if not isinstance(tensor, GlobalTensor):
        why, what = _why_not_values(tensor, kind), "a tensor"
        remedy = "give it as another dtype, as by torch.view_as_real"
    elif any(isinstance(sbp, Partial) for sbp in tensor.sbp):
        return f"a global tensor {kind}, of whose parts the sum is Partial", "give tensor.full()"
    else:
        why, what, remedy = None, "a global tensor", "give it as another dtype"
    if why is not None or dtype_name(tensor.dtype) in DTYPES.values():
        return why
    return f"{what} {kind} of {tensor.dtype}, a dtype that safetensors does not support", remedy


def _why_not_values(tensor: Tensor, kind: str) -> tuple[str, str] | None:
    if tensor.is_meta:
        return f"a tensor {kind} on the meta device, without values", "give one with values"
    if tensor.is_quantized:
        return f"a quantized tensor {kind}", "give tensor.dequantize(), or its int_repr() and scale"
    if str(tensor.layout) != "torch.strided":
        layout = str(tensor.layout).removeprefix("torch.")
        return f"a tensor {kind} of layout {layout}", "give tensor.to_dense()"
    if any(getattr(tensor, "names", ())):
        return f"a tensor {kind} with named dimensions", "give tensor.rename(None)"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        # Its values are elsewhere, or nowhere.
        return f"a tensor {kind} of the class {type(tensor).__name__}", "give a plain torch.Tensor"
    return None


def about_program(setting: ProgramSetting, steps: int, optimizers: Optimizers) -> dict[str, Any]:
    """All but the tensors of a program that has made so many steps, as JSON."""
    groups: list[list[Any]] = [[] for _ in optimizers.each]
    for i, each in enumerate(optimizers.each):
        for n, group in enumerate(each.param_groups):
            plain = {
                name: _without_tensors(value, f"the option {name!r} of parameter group {n}")
                for name, value in group.items()
                if name not in ("params", "param_names")
            }
            groups[i].append(to_json(plain, f"{_GROUP}.{i}.{n}", {}))
    return {
        "weft": __version__,
        "torch": torch.__version__,
        "steps": steps,
        "seed": setting.seed,
        "ranks": len(setting.placement.ranks),
        "groups": groups,
        "optimizers": _trained(setting.model, optimizers),
    }


def _trained(model: nn.Module, optimizers: Optimizers) -> list[list[Any]]:
    names = {id(x): key for key, x in model.named_parameters()}
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


def check_program(
    about: Mapping[str, Any], setting: ProgramSetting, graph: LogicalGraph, optimizers: Optimizers
) -> None:
    """Raise UserError unless a checkpoint is of the same parameter groups, and of the same seed where that matters."""
    steps, saved = about.get("steps", 0), about.get("groups", [])
    lists = isinstance(saved, list) and all(isinstance(each, list) for each in saved)
    if not _is_number(steps) or not isinstance(steps, int) or steps < 0 or not lists:
        raise DamagedCheckpoint(
            "weft.json is damaged: its steps or groups are missing or invalid; load another checkpoint"
        )
    if saved and optimizers:
        own = [len(each.param_groups) for each in optimizers.each]
        if [len(each) for each in saved] != own:
            raise UserError(
                f"the checkpoint has {[len(each) for each in saved]} parameter groups by optimizer, the program {own}; "
                "load it with the optimizers that were saved"
            )
        _check_trained(about, _trained(setting.model, optimizers))
    seed = about.get("seed", setting.seed)
    calls = graph.of_kind(Call)
    draws = any(call.op.startswith("weft.") and "uniform" in call.op for call in calls)
    if seed != setting.seed and optimizers and draws:
        raise UserError(
            f"the checkpoint's random ops draw by seed {seed}, the program's by {setting.seed}; compile with "
            f"seed={seed}, so that the run continues as it would have"
        )


def _check_trained(about: Mapping[str, Any], own: list[list[Any]]) -> None:
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
                        f"parameter group {number} of {kind} differs in the checkpoint: {others[0]} is in that "
                        f"of the {where} alone; load it with the optimizers that were saved, in the same groups, or "
                        "the model alone (model_only=True)"
                    )
    except UserError:
        raise
    except UNREADABLE as error:
        raise DamagedCheckpoint(
            f"weft.json is damaged: its optimizers are invalid: {type(error).__name__}; load another checkpoint"
        ) from None


def options_of(about: Mapping[str, Any], optimizers: Optimizers) -> list[list[dict[str, Any]]]:
    """The options of parameter groups that were saved, by optimizer; raises DamagedCheckpoint where one cannot be."""
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
    """True if an option may have a value: of the kind of the one that it has."""
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
    if isinstance(now, Tensor):
        return now.fill_(value)
    if isinstance(now, list | tuple) and any(isinstance(each, Tensor) for each in now):
        every = [_put(each, own) for each, own in zip(value, now, strict=True)]
        return every if isinstance(now, list) else tuple(every)
    return value


def _without_tensors(value: Any, what: str) -> Any:
    """An option as a checkpoint has it: a number in place of a tensor of one element; for more there is no place."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_meta:
            return value.item()
        raise UserError(
            f"{what} is or holds a tensor of shape {list(value.shape)}; a checkpoint can hold there numbers, texts, "
            "lists and dicts of them, and tensors of one element: give its values as a list, value.tolist()"
        )
    if isinstance(value, list | tuple):
        every = [_without_tensors(each, what) for each in value]
        return every if isinstance(value, list) else tuple(every)
    if isinstance(value, dict):
        return {name: _without_tensors(each, what) for name, each in value.items()}
    return value
