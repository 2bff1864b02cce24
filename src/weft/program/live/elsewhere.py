"""The states that an optimizer shows, and those of parameters that lie on other ranks alone.

A process shows what its own ranks keep. Of the parameters of other stages it has no state to look at, and must still
make every collective call that they need. So whoever is about to go over all states has the processes tell one another
first what they hold (`agree`).
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
from weft.ops.dtypes import dtype_name
from weft.program.everyone import told
from weft.tensor import GlobalTensor


@final
class Showing:
    """The way in which the programs of this process show an optimizer's states.

    Attributes:
        changes: how often users have changed the dicts that it shows.
        makers: by parameter that some plan updates, what makes a state of the parts of this process, as users see it:
            `show(name, parts)`.
        apart: True where some parameters lie on a part of the processes.
        agreed: True where no plan has changed states since the processes told one another.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.makers: dict[Tensor, Callable[[str, list[Any]], Any]] = {}
        self.apart = self.agreed = False

    def know(self, parameter: Tensor, show: Callable[[str, list[Any]], Any]) -> None:
        """A plan is to run that updates a parameter. Every process must call it."""
        self.makers[parameter] = show
        if isinstance(parameter, GlobalTensor):
            mesh = parameter.spec.mesh
            world, ranks = mesh.world, mesh.placement.ranks
            self.apart |= len(world.ranks) < world.size != len(ranks)


_all: WeakKeyDictionary[torch.optim.Optimizer, Showing] = WeakKeyDictionary()


def showing(optimizer: torch.optim.Optimizer) -> Showing:
    """The way in which the programs of this process show an optimizer's states."""
    return _all.setdefault(optimizer, Showing())


def agree(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let optimizers hold, of parameters that lie on other ranks alone, what is held there. Collective.

    Their states stand in the same order on all processes then.
    """
    for optimizer in optimizers:
        of = showing(optimizer)
        groups = optimizer.param_groups if of.apart else ()
        every = [p for group in groups for p in group["params"] if p in of.makers]
        every = [p for p in every if isinstance(p, GlobalTensor)]
        if every:
            _agree(optimizer.state, of, every)
            of.agreed = True


def _agree(state: Any, of: Showing, parameters: list[GlobalTensor]) -> None:
    """Agree on the states of some parameters."""

    def tell() -> str:
        own = [state.get(parameter) for parameter in parameters]
        here = [x if isinstance(x, Shown) and not x.elsewhere else None for x in own]
        return json.dumps([x and _told(x) for x in here], default=_refuse)

    every = map(json.loads, told(parameters[0].spec.mesh.world, "the states of optimizers", tell))
    for parameter, texts in zip(parameters, zip(*every, strict=True), strict=True):
        held = state.pop(parameter, None)
        if not held or (isinstance(held, Shown) and held.elsewhere):
            found: Mapping[str, Any] = next(filter(None, texts), {})
            show = of.makers[parameter]
            entries = {name: _read(name, x, show) for name, x in found.items()}
            held = Shown(entries, of, elsewhere=True)
        if held:
            state[parameter] = held


def _told(entries: Mapping[str, Any]) -> dict[str, list[Any]]:
    """States as text has them: of global tensors nothing, the values of others, which are numbers on the host."""
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
    """A state of a parameter that lies on other ranks, of what was told there."""
    match content:
        case []:
            return show(name, [])
        case [value]:
            return value
    dtype, values = content
    return torch.tensor(values, dtype=getattr(torch, dtype), device="cpu")


def _agree_before(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A step of eager code begins, which goes over all states."""
    of = _all.get(optimizer)
    if of is not None and not of.agreed:
        agree([optimizer])


_agree_before.notes_use = True  # type: ignore[attr-defined]
register_optimizer_step_pre_hook(_agree_before)


@final
class Shown(dict[str, Any]):
    """The state that an optimizer keeps for a parameter, as the user sees it; copies are ordinary dicts.

    Args:
        entries: by name.
        of: counts what the user changes in it.
        elsewhere: True where no rank of this process keeps it.
    """

    def __init__(self, entries: Mapping[str, Any], of: Showing, elsewhere: bool = False) -> None:
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

    def change(self: Shown, *args: Any, **named: Any) -> Any:
        self._of.changes += 1
        return plain(self, *args, **named)

    return change


for _name in ("__delitem__", "__ior__", "clear", "update", "setdefault", "popitem", "pop"):
    setattr(Shown, _name, _counted(_name))

# torch.utils._pytree sees the tensors in a state.
register_pytree_node(
    Shown,
    lambda shown: (list(shown.values()), list(shown)),
    lambda x, names: dict(zip(names, x, strict=True)),
)
