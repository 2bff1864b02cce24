"""The plan's side of the self-check: what its step begins with, what it gives, and what is put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from weft.capture.optimizers.trials import counted_now, put_counters
from weft.capture.tree import flatten, unflatten
from weft.compiler.training.gradients import FIRST_VALUES, SCALE
from weft.errors import BatchError
from weft.ir.logical import Update
from weft.program.core import ProgramCore
from weft.program.live.ownership import named_variables
from weft.program.live.sharded_values import whole_of
from weft.program.live.updated import agree, view_of
from weft.program.training.training import Training
from weft.program.verification.eager import wholes
from weft.runtime.memory.state import Variables


@final
class Snapshot:
    """The variables of this process's ranks, what the optimizer keeps, and the gradients that users see.

    Gradients are taken away: steps begin without any.

    """

    def __init__(
        self,
        model: nn.Module,
        variables: Mapping[int, Variables],
        training: Training,
    ) -> None:
        self._training = training
        training.take()
        self._tensors = [
            (own[key].detach(), own[key].detach().clone())
            for own in variables.values()
            for key in own
        ]
        # The states that ranks keep, and the users' view: the dicts and their contents.
        self._kept = [(own, _contents(own.kept.entries)) for own in variables.values()]
        self._states = [(each, _contents(each.state)) for each in training.optimizers.each]
        self._counted = [(each, counted_now(each)) for each in training.optimizers.each]
        self._parameters = list(dict(model.named_parameters()).values())
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._open = training.gradients.open
        self._without_gradients()

    def rewind(self) -> None:
        """Put back all but the gradients, for another step."""
        self._without_gradients()
        for tensor, before in self._tensors:
            tensor.copy_(before)
        if not self._training.optimizers:
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
        self._training.gradients.open = self._open

    def _without_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._training.gradients.take()
        self._training.gradients.open = False


def _contents(every: Mapping[Any, Any]) -> dict[Any, tuple[Any, dict[str, Any]]]:
    return {key: (each, dict(each)) for key, each in every.items()}


def _filled(each: Any, content: dict[str, Any]) -> Any:
    each.clear()
    each.update(content)
    return each


@final
@dataclass(frozen=True)
class Subject:
    """A program under verification, at the step of a number; `step` is the program's."""

    core: ProgramCore
    step: Callable[[Any, bool], Any]
    number: int

    def run(self, batch: Any, update: bool) -> Any:
        """Make this step, once more."""
        self.core.steps = self.number
        return self.step(batch, update)

    @property
    def scale(self) -> float:
        """By which the loss is scaled, with float16."""
        if not self.scaled:
            return 1.0
        own = (each[SCALE] for each in self.core.setting.variables.values() if SCALE in each)
        return float(next(own, FIRST_VALUES[SCALE]))

    @property
    def scaled(self) -> bool:
        """True if the loss is scaled, so that updates may be skipped."""
        updates = self.core.compiled.graph.of_kind(Update)
        return any(update.skip is not None for update in updates)


@final
@dataclass(frozen=True)
class Planned:
    """The results of a step of the plan.

    Attributes:
        outputs: leaves of what `step` returns, in order, by their paths.
        gradients: before they are clipped; None if a step cannot leave them.
        tensors: parameters and buffers.
        states: of the optimizer, by parameter and name.
        skipped: true if there was no update, as a gradient was not finite.
        metrics: as `Program.metrics`.
    """

    outputs: dict[str, Any]
    gradients: dict[str, Tensor] | None
    tensors: dict[str, Tensor]
    states: dict[str, dict[str, Any]]
    skipped: bool
    metrics: Mapping[str, Tensor]


def run_planned(subject: Subject, batch: Any, snapshot: Snapshot) -> Planned:
    """Run the plan: once so that it leaves gradients, where it can, and once with the update."""
    model, gradients = subject.core.setting.model, None
    # The plan for this batch is known when it has run.
    if subject.core.training.optimizers and not subject.scaled:
        subject.run(batch, False)
        named = dict(model.named_parameters())
        gradients = wholes({key: p.grad for key, p in named.items() if p.grad is not None})
        snapshot.rewind()
    scale = subject.scale
    leaves, _ = flatten(subject.run(batch, True), "output")
    outputs = {path: whole_of(leaf) for path, leaf in leaves}
    tensors = wholes(named_variables(model))
    skipped = subject.scale < scale
    return Planned(outputs, gradients, tensors, states(subject), skipped, subject.core.metrics)


def whole_batch(subject: Subject, batch: Any) -> Any:
    """The batch as ordinary tensors on the device of this process, whole. Collective."""
    setting = subject.core.setting
    device = setting.world.device(next(iter(setting.variables)))
    leaves, tree = flatten(setting.whole(batch), "batch")
    found = [whole_of(x).to(device) if isinstance(x, Tensor) else x for _, x in leaves]
    return unflatten(found, tree)


def check_values(batch: Any) -> None:
    """Raise BatchError when a tensor of a batch has no data."""
    for key, leaf in flatten(batch, "batch")[0]:
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise BatchError(
                f"a check runs the step, but the batch's leaf {key} is on the meta device and has no values; give a "
                "batch with data, or leave verify= out and call program.verify(batch) later"
            )


def states(subject: Subject) -> dict[str, dict[str, Any]]:
    """The states that the user's optimizers keep for the parameters of the model, whole. Collective."""
    optimizers = subject.core.step.optimizers.each
    agree(optimizers)
    return {
        key: {name: whole_of(value) for name, value in each.state[parameter].items()}
        for each in optimizers
        for key, parameter in subject.core.setting.model.named_parameters()
        if parameter in each.state
    }
