"""The first values of a model's variables, whole, one at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from weft.errors import UserError


def initial_values(
    model: nn.Module,
    device: torch.device,
    agree: Callable[[Callable[[], nn.Module]], nn.Module],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every parameter and buffer of a model, tied ones once: its name, itself and its value.

    The value of a tensor is itself, unless it is on the meta device: then its module is filled by
    `reset_parameters`, as when it was built, on `device`. Only one such module is whole at a time.
    Call `check_initial_values` first.

    Args:
        model, device: whose values, and where.
        agree: calls what fills a module, and raises when that fails on any process.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = _own_tensors(module)
        fill = partial(_filled, module, device)
        filled = _own_tensors(agree(fill)) if _is_meta(module) else {}
        for name, tensor in own.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                value = filled.pop(name) if tensor.is_meta else tensor
                yield f"{path}.{name}" if path else name, tensor, value


def check_initial_values(model: nn.Module) -> None:
    """Raise UserError, naming the modules, when tensors on the meta device have no way to get values."""
    unknown = [
        path or type(module).__name__
        for path, module in model.named_modules()
        if _is_meta(module) and not callable(getattr(module, "reset_parameters", None))
    ]
    if unknown:
        raise UserError(
            f"the tensors of {', '.join(unknown[:5])}{' …' if len(unknown) > 5 else ''} are on the meta device, and "
            "these modules have no reset_parameters() to fill them; give them one, or build the model on a device"
        )


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _is_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in _own_tensors(module).values())


def _filled(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of `module`, without its children's tensors, whose own tensors have their first values."""
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
    with torch.no_grad():
        twin.reset_parameters()  # type: ignore[operator]
    return twin
