"""A snapshot of all that a step of a program changes, so that it can be put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from weft.capture.optimizers.counted import counted_now, put_counters
from weft.program.live.optimizer_state import view_of
from weft.program.training.training import Training
from weft.runtime.memory.state import Variables


@final
class Snapshot:
    """The variables of this process's ranks, what the optimizer keeps, and the gradients that users see.

    Gradients are taken away: steps begin without any.

    Args:
        training: of a program that trains.
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
        # What ranks keep, and what users see of it: the dicts, and what is in them.
        self._kept = [(own, _contents(own.kept.entries)) for own in variables.values()]
        self._states = [(each, _contents(each.state)) for each in optimizers]
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
        for variables, kept in self._kept:
            for key in {**variables.kept.entries, **kept}:
                entries = kept.get(key)
                variables.keep(key, None if entries is None else _filled(*entries))
        for optimizer, states in self._states:
            view_of(optimizer).agreed = False
            optimizer.state.clear()
            optimizer.state.update({p: _filled(*entries) for p, entries in states.items()})
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


def _contents(every: Mapping[Any, Any]) -> dict[Any, tuple[Any, dict[str, Any]]]:
    """Dicts by key, each with what is in it now."""
    return {key: (each, dict(each)) for key, each in every.items()}


def _filled(each: Any, content: dict[str, Any]) -> Any:
    """A dict with what was in it before."""
    each.clear()
    each.update(content)
    return each
