"""The states of modules beside their tensors: `get_extra_state()`, as a `state_dict()` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from weft.errors import UserError

# The extra of a checkpoint under which it stands.
MODULES = "weft.modules"


def with_module_states(extra: Mapping[str, Any] | None, model: nn.Module) -> Mapping[str, Any]:
    """The user's extra, with what modules keep, by their names.

    Raises:
        UserError: the user has an extra of that name, or a module gives none.
    """
    given = {} if extra is None else extra
    if not isinstance(given, Mapping):
        return given  # it is refused where it is saved
    if MODULES in given:
        raise UserError(
            f"what get_extra_state() of modules gives stands among the extras as {MODULES!r}; give yours another name"
        )
    found = {name: _given(name, module) for name, module in _keeping(model).items()}
    return {**given, MODULES: found} if found else given


def put_module_states(extra: dict[str, Any], model: nn.Module) -> None:
    """Take out of the extras what modules keep, and give it to them."""
    saved = extra.pop(MODULES, {})
    for name, module in _keeping(model).items():
        if name in saved:
            try:
                module.set_extra_state(saved[name])
            except Exception as error:
                raise UserError(
                    f"program.load: set_extra_state() of {name or 'the model'}, a {type(module).__name__}, cannot take "
                    f"what was saved of it: {type(error).__name__}: {error}"
                ) from error


def _given(name: str, module: nn.Module) -> Any:
    try:
        return module.get_extra_state()
    except Exception as error:
        raise UserError(
            f"get_extra_state() of {name or 'the model'}, a {type(module).__name__}, gives nothing to save: "
            f"{type(error).__name__}: {error}"
        ) from error


def _keeping(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that keep something, by name."""
    own = nn.Module.get_extra_state
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(type(module), "get_extra_state", own) is not own
    }
