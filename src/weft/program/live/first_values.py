"""The first values of a model's parameters and buffers: their own, or, on the meta device, those that modules fill in.

They are made whole, one module at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from weft.errors import UserError

# Writes the own tensors of a copy of a module.
Fill: TypeAlias = Callable[[nn.Module], object]


def initial_values(
    model: nn.Module,
    device: torch.device,
    agree: Callable[[Callable[[], nn.Module]], nn.Module],
    later: Collection[str] = (),
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Every parameter and buffer of a model, tied ones once: its name, itself and its value.

    The value of a tensor is itself, unless it is on the meta device: then its module is filled, as when it was built,
    on `device`: by its `reset_parameters()`, or by `_init_weights(module)` of the model around it, as those of
    `transformers` and `timm` have it. Only one such module is whole at a time. Call `check_initial_values` first.

    Args:
        model, device: whose values, and where.
        agree: calls what fills a module, and raises when that fails on any process.
        later: names of tensors that get their values later; those on the meta device have None.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        own, filled = _own_tensors(module), dict[str, Tensor]()
        fill = _filler(model, path, module)
        if fill is not None and _to_fill(path, module, later):
            filled = _own_tensors(agree(partial(_filled, module, fill, device)))
        for name, tensor in own.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                key = _join(path, name)
                yield key, tensor, filled.pop(name, None) if tensor.is_meta else tensor


def check_initial_values(
    model: nn.Module, device: torch.device, later: Collection[str] = ()
) -> None:
    """Raise UserError, naming the tensors, when some on the meta device have no way to get values.

    What fills a module is tried where it may pass some tensor over: buffers, and modules that the model fills.
    """
    unknown: list[str] = []
    for path, module in model.named_modules():
        names = _to_fill(path, module, later)
        fill = _filler(model, path, module) if names else None
        if names and fill is None:
            unknown += names
        elif names and fill is not None:
            own = [name.removeprefix(f"{path}.") for name in names]
            buffers = [name for name in own if name in module._buffers]
            tried = own if _resets(module) is None else buffers
            unknown += [_join(path, name) for name in _passed_over(module, fill, device, tried)]
    if unknown:
        where = "no tensor of these weights fills them, and " if later else ""
        raise UserError(
            f"{', '.join(unknown[:5])}{' …' if len(unknown) > 5 else ''} are on the meta device; {where}their modules "
            "have no reset_parameters() to do it, nor the model an _init_weights(module); give them one, or build "
            "these modules on a device"
        )


def _resets(module: nn.Module) -> Fill | None:
    """The module's own way to fill a copy of itself."""
    if not callable(getattr(module, "reset_parameters", None)):
        return None
    return lambda twin: twin.reset_parameters()  # type: ignore[operator]


def _filler(model: nn.Module, path: str, module: nn.Module) -> Fill | None:
    """The way to fill a copy of a module: its own, or that of the nearest module around it that has one for others."""
    own = _resets(module)
    while own is None:
        around = model.get_submodule(path)
        found = getattr(around, "_init_weights", None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        if not path:
            return None
        path = path.rpartition(".")[0]
    return own


def _passed_over(
    module: nn.Module,
    fill: Fill,
    device: torch.device,
    names: Sequence[str],
) -> list[str]:
    """Of some tensors of a module, those that `fill` does not write: of zeros and of ones it makes different ones."""
    if not names:
        return []
    found: list[dict[str, Tensor]] = []
    for number in (0, 1):
        # Nothing is drawn for a trial, and both draw the same.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            twin = _twin(module, device)
            with torch.no_grad():
                for tensor in _own_tensors(twin).values():
                    tensor.fill_(number)
            found.append(_own_tensors(_written(twin, fill)))
    zeros, ones = found
    return [
        name
        for name in names
        if name not in zeros or not zeros[name].equal(ones[name]) or zeros[name].is_meta
    ]


def _to_fill(path: str, module: nn.Module, later: Collection[str]) -> list[str]:
    """The module's own tensors on the meta device that have to be filled, by their names in the model."""
    names = {_join(path, name): tensor for name, tensor in _own_tensors(module).items()}
    return [name for name, tensor in names.items() if tensor.is_meta and name not in later]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _filled(module: nn.Module, fill: Fill, device: torch.device) -> nn.Module:
    """A copy of `module`, without its children's tensors, whose own tensors have their first values."""
    return _written(_twin(module, device), fill)


def _written(twin: nn.Module, fill: Fill) -> nn.Module:
    with torch.no_grad():
        fill(twin)
    return twin


def _twin(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module, without its children's tensors, whose own tensors have memory and no values yet."""
    twin = copy.copy(module)
    twin._parameters = {
        name: None
        if value is None
        else nn.Parameter(torch.empty_like(value, device=device), value.requires_grad)
        for name, value in module._parameters.items()
    }
    twin._buffers = {
        name: None if value is None else torch.empty_like(value, device=device)
        for name, value in module._buffers.items()
    }
    return twin
