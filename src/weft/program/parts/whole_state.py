"""The state of a program as whole, plain tensors: parameters and buffers, and what optimizers keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.capture.optimizers.groups import Optimizers
from weft.errors import UserError
from weft.patterns import without_wrappers
from weft.program.live.laid import whole_of
from weft.program.live.masters import Masters
from weft.program.live.variables import load_whole, state_dict_names
from weft.program.one_thread import one_at_a_time
from weft.program.parts.core import ProgramPart
from weft.program.planning.build import build, gathering
from weft.program.training.states import full_states
from weft.tensor.divergence import note_write


class WholeState(ProgramPart):
    """The whole state of a program, given and taken as plain tensors."""

    @one_at_a_time
    def full_state_dict(self, masters: bool = False) -> dict[str, Tensor]:
        """Whole copies of all parameters and buffers, under the names of the model's `state_dict()`.

        Every process must call it. The tensors are on the placement's device, the same on every
        rank.

        Args:
            masters: give the float32 master of each parameter that has one, in place of what it is
                when rounded, so that `load_full_state_dict` goes on exactly there.
        """
        setting = self._core.setting
        self._core.enter("full_state_dict")
        every = self._masters() if masters else None
        compiled = gathering(setting, self._core.compiled, every.nodes.values() if every else ())
        executors = build(setting, {}, compiled, Optimizers())
        try:
            whole = setting.run(lambda rank: executors[rank].step({}))
        finally:
            for executor in executors.values():
                executor.close()
        if every is not None:
            whole |= {key: whole_of(value) for key, value in every.waiting.items()}
        names = state_dict_names(setting.model)
        return {name: whole[key] for name, key in names.items()}

    def _masters(self) -> Masters | None:
        """The masters, which are what users have written to their parameters; None where nothing trains."""
        training = self._core.training
        if training is not None:
            training.take()
        return training.masters if training is not None else None

    @one_at_a_time
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers from whole tensors, as `full_state_dict` gives them.

        Masters take the values as they are given, parameters what they are when rounded.

        Raises:
            UserError: naming the entries that are missing, unknown, or of another shape.
        """
        setting = self._core.setting
        self._core.enter("load_full_state_dict")
        if isinstance(state, Mapping):
            state = {without_wrappers(str(name)): each for name, each in state.items()}
        load_whole(setting, self._core.compiled.graph, state)
        if self._core.training is not None:
            self._core.training.masters.fill_waiting(
                {key: state[name] for name, key in state_dict_names(setting.model).items()}
            )
        if setting.several:
            note_write(setting.placement, "load_full_state_dict", state.values())
        self._core.note_loaded()

    @one_at_a_time
    def full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """`optimizer.state_dict()` with whole, plain copies of all states, on every process, which all must call it.

        `load_state_dict` takes it: of this optimizer, compiled or released, and of one on a single
        device.

        Args:
            optimizer: which of several; by default the only one.

        Raises:
            UserError: when the program was compiled without that optimizer, or with several and none
                is named.
        """
        core, found = self._core, self._core.step.optimizers.each
        if optimizer is None and len(found) == 1:
            (optimizer,) = found
        if core.training is None or not any(optimizer is one for one in found):
            raise UserError(
                f"full_optimizer_state_dict: the program has {len(found)} optimizers; name one of them, "
                "full_optimizer_state_dict(optimizer)"
            )
        assert optimizer is not None  # it is one of those
        core.enter("full_optimizer_state_dict")
        core.training.take()
        return full_states(optimizer)
