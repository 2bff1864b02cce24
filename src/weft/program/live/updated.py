"""Parameters that a plan updates: how their gradients and states are laid out there, and how users see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import register_pytree_node

from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Input, Update, Value
from weft.ir.nodes import MASTER
from weft.layout import Shares
from weft.ops.cost import dtype_name
from weft.program.agreement import gathered
from weft.program.live.ownership import LiveOwners, named_variables
from weft.program.live.variables import cut_value, global_of, laid_as
from weft.tensor import GlobalTensor
from weft.tensor.divergence import note_write


@final
@dataclass(frozen=True)
class Updated:
    """A parameter that a plan updates.

    Attributes:
        gradient: as the plan makes it, in the shares of the parameter.
        inputs: what the update writes: the parameter, then its states, its FP32 main parameter among them.
        states: the values of its states by name, but for its FP32 main parameter.
        shares: of those states that are stored in shares, by name.
    """

    key: str
    parameter: Tensor
    update: Update
    gradient: Value
    inputs: tuple[Input, ...]
    states: Mapping[str, Value]
    shares: Mapping[str, Shares]

    def gradient_laid(self, gradient: Tensor, shares: Shares | None) -> Tensor:
        """A gradient as the plan wants it, in shares; itself when it is laid out so."""
        return self._laid(gradient, self.gradient, shares)

    def gradient_shown(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts of this process's ranks as `parameter.grad`, in the dtype of the parameter."""
        parts = [part.to(self.parameter.dtype) for part in parts]
        if not isinstance(self.parameter, GlobalTensor):
            return parts[0]
        return self._global(parts, self.gradient, self.parameter.dtype, self.inputs[0].shares)

    def states_laid(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The states that the user's optimizer holds, as the plan wants them (themselves where they are laid out so).

        None if the update is to begin again; None in the place of a tensor says so, as torch's SGD has it.
        """
        self.check_states(found)
        made = {name: x for name, x in found.items() if x is not None or name not in self.states}
        for name, value in made.items():
            if isinstance(value, Tensor):
                self._note_write(value, f"{self.key}.{name}", [value])
                made[name] = self._laid(value, self.states[name], self.shares.get(name))
        return made

    def state_shown(self, name: str, parts: Sequence[Any]) -> Any:
        """A state that the ranks keep, as the user sees it.

        Raises:
            UserError: the state came so late that the plan knows nothing of it.
        """
        value = self.states.get(name)
        if not isinstance(self.parameter, GlobalTensor):
            return parts[0]
        if value is None or (parts and not isinstance(parts[0], Tensor)):
            if isinstance(parts[0], Tensor):
                raise UserError(
                    f"the optimizer keeps the state {self.key}.{name} now, and did not in its first steps, which the "
                    "program is planned from; let its first step create all states"
                )
            return parts[0]
        # Numbers of steps stay with the host.
        if parts and parts[0].device.type != self.parameter.spec.mesh.device.type:
            return parts[0]
        state = self._global(parts, value, getattr(torch, value.dtype), self.shares.get(name))
        # `state.data = …` writes values, as the ranks work with its memory.
        state.hold = LiveOwners(None)
        return state

    def note_taken_out(self, before: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Have the next step compare between processes which states the user has taken out."""
        gone = sorted(before.keys() - found.keys())
        if gone:
            self._note_write(None, f"{self.key} without {gone}", ())

    def check_states(self, found: Mapping[str, Any]) -> None:
        """Raise UserError unless all that the user's optimizer holds are states of the update, with values."""
        absent = [name for name in self.states if name in found and found[name] is None]
        there = [name for name, value in found.items() if value is not None]
        if absent and there:
            raise UserError(
                f"the optimizer brings the state {self.key}.{absent[0]} as None beside {self.key}.{there[0]}; its "
                "update has a tensor there. Delete all states of the parameter (optimizer.state.pop(parameter)), so "
                "that the update begins again, or put a tensor there"
            )
        for name, value in found.items():
            if isinstance(value, Tensor):
                self._check_state(name, value)

    def _laid(self, found: Tensor, value: Value, shares: Shares | None) -> Tensor:
        layout, dtype = value.laid, getattr(torch, value.dtype)
        if isinstance(found, GlobalTensor):
            return laid_as(found, layout, dtype, shares)
        if isinstance(self.parameter, GlobalTensor):
            mesh = self.parameter.spec.mesh.at(layout.placement)
            return cut_value(found.detach().to(dtype), layout, mesh, shares)
        return found.to(self.parameter.device, dtype).contiguous()

    def _global(
        self, parts: Sequence[Tensor], value: Value, dtype: torch.dtype, shares: Shares | None
    ) -> GlobalTensor:
        layout, parameter = value.laid, self.parameter
        assert isinstance(parameter, GlobalTensor)  # others have their one part
        mesh = parameter.spec.mesh.at(layout.placement)
        return global_of(parts, layout, mesh, value.shape, dtype, shares)

    def _note_write(self, value: Tensor | None, what: str, written: Sequence[Tensor]) -> None:
        """Note for other processes what the user has written; global tensors are noted where they are written."""
        if isinstance(self.parameter, GlobalTensor) and not isinstance(value, GlobalTensor):
            mesh = self.parameter.spec.mesh
            if not mesh.in_process:
                note_write(mesh.placement, what, written)

    def _check_state(self, name: str, found: Tensor) -> None:
        value = self.states.get(name)
        if value is None or value.shape != tuple(found.shape):
            expected = "no such state" if value is None else f"shape {list(value.shape)}"
            raise UserError(
                f"the optimizer brings the state {self.key}.{name} of shape {list(found.shape)}, its update has "
                f"{expected}; load a state_dict() of the same optimizer over the same model"
            )
        if found.is_meta:
            raise UserError(
                f"the optimizer brings the state {self.key}.{name} without values, on the meta device; "
                "load one with values, or delete the state, so that the update begins again"
            )


def updated(model: nn.Module, graph: LogicalGraph) -> Iterator[Updated]:
    """The parameters that a compiled step updates."""
    inputs = {node.value.name: node for node in graph.of_kind(Input)}
    tensors = named_variables(model)
    for update in graph.of_kind(Update):
        if update.rule != "copy":
            written = tuple(inputs[ref.name] for ref in (update.target, *update.states))
            key = written[0].key
            states = {node.key.removeprefix(f"{key}."): node for node in written[1:]}
            states.pop(MASTER, None)
            yield Updated(
                key,
                tensors[key],
                update,
                graph.values[update.source.name],
                written,
                {name: node.value for name, node in states.items()},
                {name: node.shares for name, node in states.items() if node.shares},
            )


# `optimizer.state` of a live model as the user sees it, also for parameters that only other processes hold.
#
# In a pipeline a process holds the states of its own stages. Code that goes over all states must still make the same
# collective calls on every process, so the processes first exchange which states there are (`agree`).


@final
class StateView:
    """The states of one optimizer, as the programs of this process show them to the user.

    Attributes:
        changes: how often users have changed the dicts that it shows.
        show: by parameter, makes of the parts of a state here what the user sees: `show(name, parts)`.
        on_some: True if only some of the processes hold some of the parameters.
        agreed: True if no plan has changed states since the processes told one another.
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
            entries: dict[str, Any] = {}
            for name, content in found.items():  # as `_told` has it
                if len(content) == 2:
                    dtype, values = getattr(torch, content[0]), content[1]
                    entries[name] = torch.tensor(values, dtype=dtype, device="cpu")
                else:
                    entries[name] = content[0] if content else of.show[parameter](name, [])
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
        f"an optimizer keeps a {type(value).__name__} as a state of a parameter, which cannot be sent to other "
        "stages; keep tensors, numbers of Python or texts there"
    )


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

    `elsewhere` is true if no rank of this process keeps it.
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
