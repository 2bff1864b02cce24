"""A snapshot of all that a step of a program changes, so that it can be put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.capture.optimizers.counted import counted_now, put_counters
from weft.program.training.training import Training
from weft.runtime.memory.state import Variables


@final
class Snapshot:
    """The variables of this process's ranks, what the optimizer keeps, and the gradients that users see.

    Gradients are taken away: steps begin without any.

    Args:
        model: live.
        variables: of the ranks.
        training: of a program that trains.
        optimizers: the user's.
    """

    def __init__(
        self,
        model: nn.Module,
        variables: Mapping[int, Variables],
        training: Training | None,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._training = training
        if training is not None:
            training.take()
        self._tensors = [
            (own[key].detach(), own[key].detach().clone())
            for own in variables.values()
            for key in own
        ]
        self._states: list[tuple[Any, dict[Tensor, dict[str, Any]]]] = [
            (each, {p: dict(own) for p, own in each.state.items()}) for each in optimizers
        ]
        self._counted = [(each, counted_now(each)) for each in optimizers]
        self._parameters = list(dict(model.named_parameters()).values())
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._open = training is not None and training.gradients.open
        self._without_gradients()

    def rewind(self) -> None:
        """Put back all but the gradients, for another step."""
        self._without_gradients()
        for tensor, before in self._tensors:
            tensor.copy_(before)
        if self._training is None:
            return
        for optimizer, states in self._states:
            _put_back(optimizer.state, states)
        for optimizer, counted in self._counted:
            for group, numbers in zip(optimizer.param_groups, counted, strict=True):
                put_counters(optimizer, [group], numbers)
        self._training.take()

    def put_back(self) -> None:
        """Put back everything."""
        self.rewind()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        if self._training is not None:
            self._training.gradients.open = self._open

    def _without_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        if self._training is not None:
            self._training.gradients.take()
            self._training.gradients.open = False


def _put_back(state: Any, before: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Take what is new out of an optimizer's state, and put its numbers back; of tensors, the ranks' are written."""
    for parameter in [each for each in state if each not in before]:
        del state[parameter]
    for parameter, entries in before.items():
        for name, value in entries.items():
            if not isinstance(value, Tensor):
                state[parameter][name] = value
