"""The states that an optimizer keeps for parameters: in the user's optimizer and on the ranks, the same memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from weft.capture.optimizers.groups import Optimizers
from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Input, Update, Value
from weft.ir.nodes import MASTER
from weft.layout import Layout, Shares
from weft.program.live.holds import LiveHold, named_variables
from weft.program.live.laid import by_placement, cut_value, laid_as, of_rank, whole_of
from weft.program.live.optimizer_state import VisibleState, agree, view_of
from weft.runtime.memory.state import Variables
from weft.tensor import GlobalTensor
from weft.tensor.dispatch.shares import stored_in
from weft.tensor.divergence import note_write
from weft.tensor.spec import contiguous


@final
class States:
    """The states of the parameters that a program updates by one optimizer.

    After the first step the user's `optimizer.state` holds them as global tensors (ordinary ones
    where there is one rank). What the user puts there, by `load_state_dict` or by hand, is taken over
    before the next step.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        variables: Mapping[int, Variables],
    ) -> None:
        self._optimizers = optimizers
        self.optimizer = optimizer
        self._model = model
        self._variables = variables
        self._members: dict[str, Stated] = {}
        self._of = view_of(optimizer)
        # What was there when it was last compared: the user's dicts, the changes in them, and the
        # ranks' versions.
        self._state: Any = None
        self._dicts: list[Any] = []
        self._change = self._version = -1
        # Entries that are no tensors, for which there is no common memory.
        self._numbers: list[tuple[dict[str, Any], str, list[dict[str, Any]]]] = []
        # Those that no rank of this process updates.
        self._elsewhere: list[Stated] = []

    def know(self, graph: LogicalGraph) -> None:
        """A plan is to run, which updates these parameters. Call `check_states` first."""
        # The user may have loaded states since the last step.
        self.take()
        for each in _stated(self._model, graph):
            for variables in self._variables.values():
                variables.parameters[each.key] = each.parameter
            if self._optimizers.place(each.group)[0] is not self.optimizer:
                self._members.pop(each.key, None)
            elif each.key not in self._members:
                self._members[each.key] = each
                self._of.add(each.parameter, each.shown)
                self._take(each)
        here = self._variables
        self._elsewhere = [x for x in self.members if not by_placement(here, x.parameter)]
        self._note()

    def take(self) -> None:
        """Take over what has changed in the user's optimizer; some microseconds when nothing has.

        Raises:
            UserError: as `check_states`.
        """
        state = self.optimizer.state
        same = state is self._state and len(state) == len(self._dicts)
        if not (
            same and self._change == self._of.changes and all(map(is_, state.values(), self._dicts))
        ):
            for member in self._members.values():
                self._take(member)
            self._note()
        for shown, name, kept in self._numbers:
            for entries in kept:
                entries[name] = shown[name]

    def made(self) -> Iterator[Tensor]:
        """The tensors that the ranks have made and the user's optimizer does not show yet; mostly none, at once."""
        if self._version != self._versions():
            for member in self._members.values():
                if not self.optimizer.state.get(member.parameter):
                    for kept in self._kept(member):
                        yield from (each for each in kept.values() if isinstance(each, Tensor))

    def show(self, updated: Collection[str] = (), surely: bool = True) -> None:
        """Let the user's optimizer hold what the ranks have made in a step; some microseconds when that is nothing.

        Args:
            updated: the parameters that the step has updated, on whatever rank.
            surely: False where the update may have been skipped.
        """
        made = self._version != self._versions()
        for member in self._members.values() if made else ():
            self._show(member)
        state = self.optimizer.state
        new = [
            each
            for each in (self._elsewhere if made or surely else ())
            if each.states and each.key in updated and not state.get(each.parameter)
        ]
        for each in new:
            entries = {name: each.shown(name, []) for name in each.states}
            state[each.parameter] = VisibleState(entries, self._of, elsewhere=True)
        if made or new:
            self._note()
        self._of.agreed &= not updated
        for shown, name, kept in self._numbers:
            dict.__setitem__(shown, name, kept[0][name])

    @property
    def members(self) -> Collection[Stated]:
        """The parameters that are updated."""
        return self._members.values()

    def put(self, values: Mapping[str, Mapping[int, dict[str, Any]]]) -> None:
        """Let the ranks keep other states, by parameter and rank; the update of what is not there begins anew."""
        for key, member in self._members.items():
            self.optimizer.state.pop(member.parameter, None)
            for rank, variables in self._variables.items():
                if key in variables:
                    variables.keep(key, values.get(key, {}).get(rank))
        self.show()

    def _take(self, member: Stated) -> None:
        """Give the ranks what the user's optimizer holds for a parameter."""
        found = self.optimizer.state.get(member.parameter)
        laid = member.taken(found or {})
        same = isinstance(found, VisibleState) and all(x is found[name] for name, x in laid.items())
        for rank, variables in self._variables.items():
            if member.key in variables:
                member.note_taken_out(variables.kept.entries.get(member.key, {}), laid)
                own = {name: of_rank(value, rank) for name, value in laid.items()}
                same &= _keep(variables, member.key, own if laid else None)
        if laid and not same:
            kept = self._kept(member)
            shown = {
                name: member.shown(name, [own[name] for own in kept]) if kept else value
                for name, value in laid.items()
            }
            self.optimizer.state[member.parameter] = VisibleState(
                shown, self._of, elsewhere=not kept
            )

    def _show(self, member: Stated) -> None:
        """Let the user's optimizer hold what the ranks keep for a parameter, where it holds something else."""
        kept = self._kept(member)
        shown = self.optimizer.state.get(member.parameter) or {}
        if not kept or not kept[0]:
            return
        parts = {name: [own[name] for own in kept] for name in kept[0]}
        if shown.keys() != parts.keys() or not all(
            all(map(is_, _parts(shown[name]), every))
            for name, every in parts.items()
            if isinstance(every[0], Tensor)
        ):
            entries = {name: member.shown(name, every) for name, every in parts.items()}
            self.optimizer.state[member.parameter] = VisibleState(entries, self._of)

    def _kept(self, member: Stated) -> list[dict[str, Any]]:
        """The states that the ranks of this process keep for a parameter; nothing where it lives on others."""
        every = by_placement(self._variables, member.parameter)
        return [x.kept.entries.get(member.key, {}) for x in every if member.key in x]

    def _note(self) -> None:
        state = self.optimizer.state
        self._state, self._dicts = state, list(state.values())
        self._change, self._version = self._of.changes, self._versions()
        self._numbers = [
            (state[member.parameter], name, kept)
            for member in self._members.values()
            if (kept := self._kept(member)) and member.parameter in state
            for name, value in kept[0].items()
            if not isinstance(value, Tensor)
        ]

    def _versions(self) -> int:
        return sum(each.kept.version for each in self._variables.values())


@final
@dataclass(frozen=True)
class Stated:
    """A parameter that is updated, the number of its group, and its states by name: values, and shares."""

    key: str
    parameter: Tensor
    group: int
    states: Mapping[str, Value]
    shares: Mapping[str, Shares]

    def taken(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The states that the user's optimizer holds, as the plan wants them; none where it is to begin anew.

        None in the place of a tensor says so, as torch's SGD has it.
        """
        self.check_whole(found)
        return {
            name: self.laid(name, value)
            for name, value in found.items()
            if value is not None or name not in self.states
        }

    def laid(self, name: str, value: Any) -> Any:
        """A state that the user's optimizer holds, as the plan wants it; itself when it lies so."""
        if not isinstance(value, Tensor):
            return value
        self.check(name, value)
        layout, dtype = _laid_out(self.states[name])
        if isinstance(value, GlobalTensor):
            return laid_as(value, layout, dtype, self.shares.get(name))
        if not isinstance(self.parameter, GlobalTensor):
            return value.to(self.parameter.device, dtype).contiguous()
        mesh = self.parameter.spec.mesh.at(layout.placement)
        if not mesh.in_process:
            note_write(mesh.placement, f"{self.key}.{name}", [value])
        return cut_value(value.detach().to(dtype), layout, mesh, self.shares.get(name))

    def note_taken_out(self, before: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Have the next step compare between processes which states the user has taken out."""
        gone = sorted(before.keys() - found.keys())
        if gone and isinstance(self.parameter, GlobalTensor):
            mesh = self.parameter.spec.mesh
            if not mesh.in_process:
                note_write(mesh.placement, f"{self.key} without {gone}")

    def shown(self, name: str, parts: list[Any]) -> Any:
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
                    f"the optimizer keeps the state {self.key}.{name} now, and did not in its first steps, by "
                    "which the program is planned; let its first step make all states"
                )
            return parts[0]
        layout, dtype = _laid_out(value)
        mesh = self.parameter.spec.mesh.at(layout.placement)
        # Numbers of steps stay with the host.
        if parts and parts[0].device.type != mesh.device.type:
            return parts[0]
        spec = contiguous(mesh, layout, value.shape, dtype)
        state = stored_in(GlobalTensor(spec, tuple(parts)), self.shares.get(name))
        state.hold = LiveHold(
            None
        )  # `state.data = …` writes values, as the ranks work with its memory
        return state

    def check_whole(self, found: Mapping[str, Any]) -> None:
        """Raise UserError where None stands in the place of some states of the update, and others are there."""
        absent = [name for name in self.states if name in found and found[name] is None]
        there = [name for name, value in found.items() if value is not None]
        if absent and there:
            raise UserError(
                f"the optimizer brings the state {self.key}.{absent[0]} as None beside {self.key}.{there[0]}; its "
                "update has a tensor there. Delete all states of the parameter (optimizer.state.pop(parameter)), so "
                "that the update begins anew, or put a tensor there"
            )

    def check(self, name: str, found: Tensor) -> None:
        """Raise UserError unless a state that the user's optimizer holds is one of the update's, with values."""
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
                "load one with values, or delete the state, so that the update begins anew"
            )


def check_states(model: nn.Module, optimizers: Optimizers, graph: LogicalGraph) -> None:
    """Check that what the user's optimizers hold fits a plan; needs no other process.

    Raises:
        UserError: naming a state that an optimizer brings and its update does not have, of another
            shape, or None beside others.
    """
    for member in _stated(model, graph):
        optimizer, _ = optimizers.place(member.group)
        found = optimizer.state.get(member.parameter, {})
        member.check_whole(found)
        for name, value in found.items():
            if isinstance(value, Tensor):
                member.check(name, value)


def full_states(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The result of `optimizer.state_dict()`, with whole, plain copies of its tensors. Collective."""
    agree([optimizer])
    found: dict[str, Any] = tree_map(whole_of, optimizer.state_dict())
    return found


def _stated(model: nn.Module, graph: LogicalGraph) -> Iterator[Stated]:
    inputs = {node.value.name: node for node in graph.of_kind(Input)}
    tensors = named_variables(model)
    for update in graph.of_kind(Update):
        if update.rule != "copy":
            key = inputs[update.target.name].key
            states = [inputs[ref.name] for ref in update.states]
            named = {node.key.removeprefix(f"{key}."): node for node in states}
            named.pop(MASTER, None)
            values = {name: node.value for name, node in named.items()}
            shares = {name: node.shares for name, node in named.items() if node.shares}
            yield Stated(key, tensors[key], update.group, values, shares)


def _parts(shown: Any) -> Sequence[Any]:
    """The parts that this process has of a state that the user sees."""
    return shown.locals if isinstance(shown, GlobalTensor) else (shown,)


def _laid_out(value: Value) -> tuple[Layout, torch.dtype]:
    """Layout and dtype of a value of a compiled graph."""
    assert value.layout is not None  # all values of a compiled graph have one
    dtype: torch.dtype = getattr(torch, value.dtype)
    return value.layout, dtype


def _keep(variables: Variables, key: str, own: dict[str, Any] | None) -> bool:
    """Let a rank keep other values for a parameter, in the memory that it has; whether they were these already."""
    before = variables.kept.entries.get(key)
    if not own or not before or not _alike(own, before):
        variables.keep(key, own)
        return False
    # One may be in the memory of another, which is about to be written.
    new = {
        name: value.detach().clone()
        for name, value in own.items()
        if isinstance(value, Tensor) and before[name] is not value
    }
    for name, value in own.items():
        if name in new:
            before[name].detach().copy_(new[name])
        else:
            before[name] = value
    return not new


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True where two dicts hold tensors, and numbers, under the same names."""
    return one.keys() == other.keys() and all(
        isinstance(value, Tensor) == isinstance(other[name], Tensor) for name, value in one.items()
    )
