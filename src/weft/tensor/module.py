"""Modules with global parameters; plain copies of what holds global tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.errors import LayoutError, UserError, wrong
from weft.layout import SBP, Broadcast, Placement, broadcast
from weft.patterns import check_named, first_match
from weft.tensor.arguments import checked_placement
from weft.tensor.create import tensor
from weft.tensor.global_tensor import GlobalTensor, keep_gradient_with

Module = TypeVar("Module", bound=nn.Module)


def distribute(
    module: Module,
    placement: Placement,
    layouts: Mapping[str, SBP | Sequence[SBP]] | None = None,
) -> Module:
    """Make the parameters and buffers of a module global, in place.

    Gradients of parameters are brought to the layout of their parameter as soon as they are
    complete.

    Args:
        module: on each process with the same shapes; the values of the placement's first rank
            count.
        placement: where the parameters lie.
        layouts: patterns of names (docs/patterns.md) and the SBP of what they match; the first that
            matches counts. Tensors that no pattern matches, and scalars, are Broadcast.

    Returns:
        `module` itself.

    Raises:
        UserError: when it is no module.
        StrategyError: when a pattern matches nothing.
        LayoutError: when a layout does not fit a tensor.
    """
    if not isinstance(module, nn.Module):
        raise UserError(
            f"weft.distribute takes a module, got an object of type {type(module).__name__}; "
            "weft.tensor(x, placement=…, sbp=…) makes a tensor global, weft.from_local the parts of one"
        )
    checked_placement(placement, "weft.distribute")
    patterns = {} if layouts is None else layouts
    if not isinstance(patterns, Mapping) or not all(isinstance(each, str) for each in patterns):
        raise wrong("weft.distribute: layouts=", "a mapping from name patterns to SBPs", layouts)
    named = [*module.named_parameters(), *module.named_buffers()]
    names = [name for name, _ in named]
    for pattern in patterns:
        check_named(f"distribute: {pattern!r}", pattern, names, "parameters and buffers")
    made = {
        id(value): _global(name, value, placement, _sbp(name, value, patterns))
        for name, value in named
    }
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            own.update({name: made[id(x)] for name, x in own.items() if x is not None})
    return module


def _sbp(name: str, value: Tensor, patterns: Mapping[str, Any]) -> Any:
    if not value.dim():
        return broadcast
    chosen = first_match(patterns, name)
    return Broadcast() if chosen is None else patterns[chosen]


def _global(name: str, value: Tensor, placement: Placement, sbp: Any) -> Any:
    if isinstance(value, GlobalTensor):
        raise LayoutError(
            f"distribute: {name} is a global tensor already; use its to_global(…) for another layout"
        )
    try:
        made = tensor(value, placement=placement, sbp=sbp)
    except LayoutError as error:
        raise LayoutError(f"distribute: {name}: {error}") from None
    if not isinstance(value, nn.Parameter):
        return made
    parameter = nn.Parameter(made, value.requires_grad)
    if value.requires_grad:
        keep_gradient_with(parameter)
    return parameter


def whole(value: Any) -> Any:
    """A copy with a whole plain tensor in place of each global tensor; every process must call it.

    So code that knows nothing of weft takes what a live model holds, on any number of ranks.

    Args:
        value: a tensor, dicts, lists and tuples of such, or a module, of which it is a copy, without gradients. Other
        objects stay as they are.
    """
    if not isinstance(value, nn.Module):
        return pytree.tree_map_only(GlobalTensor, GlobalTensor.full, value)
    copies: dict[int, Any] = {}
    for held in (*value.parameters(), *value.buffers()):
        if isinstance(held, GlobalTensor):
            plain = held.detach().full()  # type: ignore[attr-defined]
            is_parameter = isinstance(held, nn.Parameter)
            copies[id(held)] = nn.Parameter(plain, held.requires_grad) if is_parameter else plain
    return copy.deepcopy(value, copies)
