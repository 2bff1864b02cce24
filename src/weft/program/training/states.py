"""The states of parameters: the user's optimizer and the ranks share their memory; FP32 main
parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from weft.capture.optimizer_groups import Optimizers
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.ir.nodes import MASTER
from weft.program.live.updated import Updated, VisibleState, agree, updated, view_of
from weft.program.live.variables import (
    add_main_parameters,
    by_placement,
    cut_value,
    global_of,
    laid_as,
    of_rank,
    whole_of,
)
from weft.runtime.memory.state import Variables
from weft.tensor import GlobalTensor


@final
class States:
    """The states of the parameters that a program updates by one optimizer.

    After the first step the user's `optimizer.state` holds them as global tensors (ordinary ones where there is one
    rank). States that you put there, by `load_state_dict` or by hand, are taken over before the next step.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        optimizer: torch.optim.Optimizer,
        variables: Mapping[int, Variables],
    ) -> None:
        self._optimizers = optimizers
        self.optimizer = optimizer
        self._variables = variables
        self._members: dict[str, Updated] = {}
        self._of = view_of(optimizer)
        # The state at the last comparison: the user's dicts, the changes in them, and the
        # ranks' versions.
        self._state: Any = None
        self._dicts: list[Any] = []
        self._change = self._version = -1
        # Entries that are not tensors, for which there is no common memory.
        self._numbers: list[tuple[dict[str, Any], str, list[dict[str, Any]]]] = []
        # The ones that no rank of this process updates.
        self._elsewhere: list[Updated] = []

    def add_plan(self, members: Iterable[Updated]) -> None:
        """A plan is to run, which updates these parameters. Call `check_states` first."""
        # The user may have loaded states since the last step.
        self.take()
        for each in members:
            for variables in self._variables.values():
                variables.parameters[each.key] = each.parameter
            if self._optimizers.place(each.update.group)[0] is not self.optimizer:
                self._members.pop(each.key, None)
            elif each.key not in self._members:
                self._members[each.key] = each
                self._of.add(each.parameter, each.state_shown)
                self._take(each)
        here = self._variables
        self._elsewhere = [x for x in self.members if not by_placement(here, x.parameter)]
        self._note()

    def take(self) -> None:
        """Take over what has changed in the user's optimizer; some microseconds when nothing has."""
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
        """Let the user's optimizer hold what the ranks have made in a step; some microseconds when nothing is new.

        `updated`: the parameters that the step has updated, on whatever rank; `surely`: the update cannot have been
        skipped.
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
            entries = {name: each.state_shown(name, []) for name in each.states}
            state[each.parameter] = VisibleState(entries, self._of, elsewhere=True)
        if made or new:
            self._note()
        self._of.agreed &= not updated
        for shown, name, kept in self._numbers:
            dict.__setitem__(shown, name, kept[0][name])

    @property
    def members(self) -> Collection[Updated]:
        return self._members.values()

    def put(self, values: Mapping[str, Mapping[int, dict[str, Any]]]) -> None:
        """Let the ranks keep other states, by parameter and rank; the update of what is not there begins again."""
        for key, member in self._members.items():
            self.optimizer.state.pop(member.parameter, None)
            for rank, variables in self._variables.items():
                if key in variables:
                    variables.keep(key, values.get(key, {}).get(rank))
        self.show()

    def _take(self, member: Updated) -> None:
        """Give the ranks what the user's optimizer holds for a parameter."""
        held = self.optimizer.state.get(member.parameter)
        laid = member.states_laid(held or {})
        same = isinstance(held, VisibleState) and all(x is held[name] for name, x in laid.items())
        for rank, variables in self._variables.items():
            if member.key in variables:
                member.note_taken_out(variables.kept.entries.get(member.key, {}), laid)
                own = {name: of_rank(value, rank) for name, value in laid.items()}
                same &= _keep(variables, member.key, own if laid else None)
        if laid and not same:
            kept = self._kept(member)
            shown = {
                name: member.state_shown(name, [own[name] for own in kept]) if kept else value
                for name, value in laid.items()
            }
            self.optimizer.state[member.parameter] = VisibleState(
                shown, self._of, elsewhere=not kept
            )

    def _show(self, member: Updated) -> None:
        """Let the user's optimizer hold what the ranks keep for a parameter, where it holds something else."""
        kept = self._kept(member)
        shown = self.optimizer.state.get(member.parameter) or {}
        if not kept or not kept[0]:
            return
        parts = {name: [own[name] for own in kept] for name in kept[0]}
        if shown.keys() != parts.keys() or not all(
            all(map(is_, getattr(shown[name], "locals", (shown[name],)), every))
            for name, every in parts.items()
            if isinstance(every[0], Tensor)
        ):
            entries = {name: member.state_shown(name, every) for name, every in parts.items()}
            self.optimizer.state[member.parameter] = VisibleState(entries, self._of)

    def _kept(self, member: Updated) -> list[dict[str, Any]]:
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


def check_states(model: nn.Module, optimizers: Optimizers, graph: LogicalGraph) -> None:
    """Raise UserError unless what the optimizers hold fits a plan: names, shapes, none None beside others."""
    for member in updated(model, graph):
        optimizer, _ = optimizers.place(member.update.group)
        member.check_states(optimizer.state.get(member.parameter, {}))


def full_states(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The result of `optimizer.state_dict()`, with whole, plain copies of its tensors. Collective."""
    agree([optimizer])
    content: dict[str, Any] = tree_map(whole_of, optimizer.state_dict())
    return content


def _keep(variables: Variables, key: str, own: dict[str, Any] | None) -> bool:
    """Let a rank keep other values for a parameter, in the memory that it has; whether they were these already."""
    now, before = own or {}, variables.kept.entries.get(key) or {}
    if (
        not now
        or now.keys() != before.keys()
        or not all(
            isinstance(x, Tensor) == isinstance(before[name], Tensor) for name, x in now.items()
        )
    ):
        variables.keep(key, own)
        return False
    # One may be in the memory of another, which is about to be written.
    new = {
        name: value.detach().clone()
        for name, value in now.items()
        if isinstance(value, Tensor) and before[name] is not value
    }
    for name, value in now.items():
        if name in new:
            before[name].detach().copy_(new[name])
        else:
            before[name] = value
    return not new


@final
class MainParameters:
    """The FP32 main parameters of all ranks of this process.

    Attributes:
        nodes: the inputs of all FP32 main parameters, by key, as the plans have them that ran so far.
        waiting: FP32 main parameters, from a checkpoint, of parameters that no plan updates so far, by the
            parameter: laid out like it, or whole if it is an ordinary tensor.
    """

    def __init__(self, variables: Mapping[int, Variables]) -> None:
        self._variables = variables
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.nodes: dict[str, Input] = {}
        self.waiting: dict[str, Tensor] = {}
        self._frozen: dict[str, Tensor] = {}

    def add_plan(self, graph: LogicalGraph) -> None:
        """A plan is to run, which may update parameters that had no master yet. Every process must call it."""
        add_main_parameters(self._variables, graph)
        end = f".{MASTER}"
        for node in graph.of_kind(Input):
            if node.role == "state" and node.key.endswith(end) and node.key not in self.nodes:
                self.nodes[node.key] = node
                waiting = self.waiting.pop(node.key.removesuffix(end), None)
                if isinstance(waiting, GlobalTensor):
                    waiting = laid_as(waiting, node.value.laid, torch.float32, node.shares)
                for rank, variables in self._variables.items() if waiting is not None else ():
                    if node.key in variables:
                        variables.write(node.key, of_rank(waiting, rank))
        self._pairs = [
            (each[key.removesuffix(end)].detach(), each[key].detach())
            for each in self._variables.values()
            for key in each
            if key.endswith(end)
        ]

    def whole(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All FP32 main parameters, as plain copies by the keys of their parameters. Collective."""
        wholes: dict[str, Tensor] = {}
        for node in self.nodes.values():
            key, value = node.key.removesuffix(f".{MASTER}"), node.value
            parameter = parameters[key]
            if isinstance(parameter, GlobalTensor):
                mesh = parameter.spec.mesh.at(value.laid.placement)
                parts = [self._variables[rank][node.key].detach() for rank in mesh.ranks]
                about = value.laid, mesh, value.shape, torch.float32, node.shares
                wholes[key] = whole_of(global_of(parts, *about))
            else:
                (variables,) = self._variables.values()
                wholes[key] = variables[node.key].detach().clone()
        return wholes | {key: whole_of(each) for key, each in self.waiting.items()}

    def wait(self, masters: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Keep FP32 main parameters of parameters that no plan updates so far, each as parameter and FP32 main
        parameter, in place of others.
        """
        self.waiting = {key: master for key, (_, master) in masters.items()}
        self._frozen = {key: parameter for key, (parameter, _) in masters.items()}

    def fill_waiting(self, whole: Mapping[str, Tensor]) -> None:
        """Let the FP32 main parameters that wait for a plan be what whole tensors hold, by the parameters' keys."""
        for key, waiting in self.waiting.items():
            value = whole[key].to(waiting.dtype)
            if isinstance(waiting, GlobalTensor):
                spec = waiting.spec
                waiting = cut_value(value, spec.layout, spec.mesh, waiting.shares)
            else:
                waiting = value.detach().to(waiting.device, copy=True)
            self.waiting[key] = waiting

    def take(self) -> None:
        """Let FP32 main parameters be what was written to their parameters."""
        for parameter, master in self._pairs:
            follow(master, parameter)
        for key, master in self.waiting.items():
            parameter = self._frozen[key]
            if isinstance(master, GlobalTensor) and isinstance(parameter, GlobalTensor):
                pairs = list(zip(master.locals, parameter.locals, strict=True))
            else:
                pairs = [(master, parameter)]
            for wide, narrow in pairs:
                follow(wide.detach(), narrow.detach())


def follow(wide: Tensor, narrow: Tensor) -> None:
    """Write to `wide` the elements of `narrow` that differ from `wide`, rounded: those that the user has written.

    Values are compared, because a tensor's count of its writes does not see all of them.
    """
    same = narrow == wide.to(narrow.dtype)
    torch.where(same, wide, narrow.to(wide.dtype), out=wide)
