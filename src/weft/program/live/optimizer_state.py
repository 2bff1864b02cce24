"""`optimizer.state` of a live model as the user sees it, also for parameters that only other processes hold.

In a pipeline a process holds the states of its own stages. Code that goes over all states must still make the same
collective calls on every process, so the processes first exchange which states there are (`agree`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import register_pytree_node

from weft.errors import UserError
from weft.ops.cost import dtype_name
from weft.program.agreement import gathered
from weft.tensor import GlobalTensor


@final
class StateView:
    """The states of one optimizer, as the programs of this process show them to the user.

    Attributes:
        changes: how often users have changed the dicts that it shows.
        show: by parameter that some plan updates, makes of its parts here a state for the user: `show(name, parts)`.
        on_some: True where only some of the processes hold some of the parameters.
        agreed: True where no plan has changed states since the processes told one another.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.show: dict[Tensor, Callable[[str, list[Any]], Any]] = {}
        self.on_some = self.agreed = False

    def add(self, parameter: Tensor, show: Callable[[str, list[Any]], Any]) -> None:
        """Register a parameter that some plan updates. Every process must call it."""
        self.show[parameter] = show
        if isinstance(parameter, GlobalTensor):
            mesh = parameter.spec.mesh
            world, ranks = mesh.world, mesh.placement.ranks
            self.on_some |= world.several and len(ranks) < world.size


_all: WeakKeyDictionary[torch.optim.Optimizer, StateView] = WeakKeyDictionary()


def view_of(optimizer: torch.optim.Optimizer) -> StateView:
    """The view of the states of one optimizer in this process."""
    return _all.setdefault(optimizer, StateView())


def agree(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Add entries for the states of parameters on other ranks, in the same order on all processes. Collective."""
    for optimizer in optimizers:
        of = view_of(optimizer)
        groups = optimizer.param_groups if of.on_some else ()
        every = [p for group in groups for p in group["params"] if p in of.show]
        every = [p for p in every if isinstance(p, GlobalTensor)]
        if every:
            _agree(optimizer.state, of, every)
            of.agreed = True


def _agree(state: Any, of: StateView, parameters: list[GlobalTensor]) -> None:
    """Agree on the states of some parameters."""

    def tell() -> str:
        own = [state.get(parameter) for parameter in parameters]
        here = [x if isinstance(x, VisibleState) and not x.elsewhere else None for x in own]
        return json.dumps([x and _told(x) for x in here], default=_refuse)

    every = map(
        json.loads, gathered(parameters[0].spec.mesh.world, "the states of optimizers", tell)
    )
    for parameter, texts in zip(parameters, zip(*every, strict=True), strict=True):
        held = state.pop(parameter, None)
        if not held or (isinstance(held, VisibleState) and held.elsewhere):
            found: Mapping[str, Any] = next(filter(None, texts), {})
            show = of.show[parameter]
            entries = {name: _read(name, x, show) for name, x in found.items()}
            held = VisibleState(entries, of, elsewhere=True)
        if held:
            state[parameter] = held


def _told(entries: Mapping[str, Any]) -> dict[str, list[Any]]:
    """A state as JSON: no content for a global tensor, [dtype, values] for a host tensor, [value] for anything else."""
    return {
        name: []
        if isinstance(x, GlobalTensor)
        else [dtype_name(x.dtype), x.tolist()]
        if isinstance(x, Tensor)
        else [x]
        for name, x in entries.items()
    }


def _refuse(value: object) -> None:
    raise UserError(
        f"an optimizer keeps a {type(value).__name__} as a state of a parameter, of which other stages cannot "
        "be told; keep tensors, numbers of Python or texts there"
    )


def _read(name: str, content: list[Any], show: Callable[[str, list[Any]], Any]) -> Any:
    """The state of a parameter on other ranks, from what their process has told."""
    match content:
        case []:
            return show(name, [])
        case [value]:
            return value
    dtype, values = content
    return torch.tensor(values, dtype=getattr(torch, dtype), device="cpu")


def _agree_before(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Run `agree` before the user's own `optimizer.step()`, which goes over all states."""
    of = _all.get(optimizer)
    if of is not None and not of.agreed:
        agree([optimizer])


# A hook of weft's does not keep a group from its fused kernel (`weft.runtime.executor.optimizer`).
_agree_before.notes_use = True  # type: ignore[attr-defined]
register_optimizer_step_pre_hook(_agree_before)


@final
class VisibleState(dict[str, Any]):
    """The state that an optimizer keeps for a parameter, as the user sees it; copies are ordinary dicts.

    Args:
        entries: by name.
        of: counts what the user changes in it.
        elsewhere: True where no rank of this process keeps it.
    """

    def __init__(self, entries: Mapping[str, Any], of: StateView, elsewhere: bool = False) -> None:
        super().__init__(entries)
        self._of = of
        self.elsewhere = elsewhere

    def __setitem__(self, name: str, value: Any) -> None:
        # Optimizers put back what they took out.
        if self.get(name) is not value:
            self._of.changes += 1
        super().__setitem__(name, value)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _counted(name: str) -> Callable[..., Any]:
    """A method of dicts that counts as a change."""
    plain = getattr(dict, name)

    def change(self: VisibleState, *args: Any, **named: Any) -> Any:
        self._of.changes += 1
        return plain(self, *args, **named)

    return change


for _name in ("__delitem__", "__ior__", "clear", "update", "setdefault", "popitem", "pop"):
    setattr(VisibleState, _name, _counted(_name))

# torch.utils._pytree sees the tensors in a state.
register_pytree_node(
    VisibleState,
    lambda shown: (list(shown.values()), list(shown)),
    lambda x, names: dict(zip(names, x, strict=True)),
)
