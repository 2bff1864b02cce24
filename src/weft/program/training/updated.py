"""Parameters that a plan updates: how their gradients and states lie there, and how users see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Input, Update, Value
from weft.ir.nodes import MASTER
from weft.layout import Shares
from weft.program.live.ownership import LiveOwners, named_variables
from weft.program.live.sharded_values import cut_value, global_of, laid_as
from weft.tensor import GlobalTensor
from weft.tensor.divergence import note_write


@final
@dataclass(frozen=True)
class Updated:
    """A parameter that a plan updates.

    Attributes:
        gradient: as the plan makes it, in the shares of the parameter.
        inputs: what the update writes: the parameter, then its states, its master among them.
        states: the values of its states by name, but for its master.
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
        """A gradient as the plan wants it, in shares; itself when it lies so."""
        return self._laid(gradient, self.gradient, shares)

    def gradient_shown(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts of this process's ranks as `parameter.grad`, in the dtype of the parameter."""
        parts = [part.to(self.parameter.dtype) for part in parts]
        if not isinstance(self.parameter, GlobalTensor):
            return parts[0]
        return self._global(parts, self.gradient, self.parameter.dtype, self.inputs[0].shares)

    def states_laid(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The states that the user's optimizer holds, as the plan wants them; none where it is to begin anew.

        None in the place of a tensor says so, as torch's SGD has it.
        """
        self._check_whole(found)
        return {
            name: self.state_laid(name, value)
            for name, value in found.items()
            if value is not None or name not in self.states
        }

    def state_laid(self, name: str, value: Any) -> Any:
        """A state that the user's optimizer holds, as the plan wants it; itself when it lies so."""
        if not isinstance(value, Tensor):
            return value
        self._check_state(name, value)
        self._note_write(value, f"{self.key}.{name}", [value])
        return self._laid(value, self.states[name], self.shares.get(name))

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
                    f"the optimizer keeps the state {self.key}.{name} now, and did not in its first steps, by "
                    "which the program is planned; let its first step make all states"
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
        self._check_whole(found)
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

    def _check_whole(self, found: Mapping[str, Any]) -> None:
        """Raise UserError where None stands in the place of some states of the update, and others are there."""
        absent = [name for name in self.states if name in found and found[name] is None]
        there = [name for name, value in found.items() if value is not None]
        if absent and there:
            raise UserError(
                f"the optimizer brings the state {self.key}.{absent[0]} as None beside {self.key}.{there[0]}; its "
                "update has a tensor there. Delete all states of the parameter (optimizer.state.pop(parameter)), so "
                "that the update begins anew, or put a tensor there"
            )

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
                "load one with values, or delete the state, so that the update begins anew"
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
