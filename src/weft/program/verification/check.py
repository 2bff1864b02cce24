"""`Program.verify`: one step of the plan and one plain step on copies, and what both give compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.capture.batch import Number
from weft.capture.optimizers.trials import counted_now, put_counters
from weft.capture.tracing.step_call import Casts
from weft.capture.tree import flatten, unflatten
from weft.compiler.training.gradients import FIRST_VALUES, SCALE
from weft.errors import BatchError, VerificationError
from weft.ir.logical import Input, Update
from weft.program.agreement import gathered
from weft.program.core import ProgramCore
from weft.program.live.ownership import named_variables
from weft.program.live.updated import agree, view_of
from weft.program.live.variables import whole_of
from weft.program.training.training import Training
from weft.program.verification.compare import (
    CHANGES,
    DIFFERS,
    LATER,
    Compared,
    Rounding,
    Verified,
    coarsest,
    compare,
    difference,
    failure_text,
    in_order,
    largest,
    moved,
)
from weft.program.verification.eager import PlainStep, PlainUpdate, Results, draws_of, wholes
from weft.runtime.memory.state import Variables
from weft.strategy.precision import Precision

# How often parameters are moved where something differs.
_MOVEMENTS = 6
# How many times as much as sums in another order a step may change when it runs again, where kernels
# add up in any order.
_REPEATED = 8
# Dtypes in which Python holds numbers that are rounded.
_WIDEST = {float: torch.float64, complex: torch.complex128}


def verify_step(subject: Subject, batch: Any) -> Verified:
    """Compare a step of the plan with a plain one; the program is afterwards as it was. Every process must call it.

    Where states begin in this step, the next one, which is the first to use them, is compared too.

    Raises:
        VerificationError: on all processes, naming the first result that differs.
    """
    check_values(batch)
    core = subject.core
    parts = core.setting.model, core.setting.variables, core.training
    snapshot = Snapshot(*parts)
    try:
        compared, began = _compared(subject, batch, snapshot, DIFFERS)
        if began:
            subject.run(batch, True)
            subject = replace(subject, number=subject.number + 1)
            more, _ = _compared(subject, batch, Snapshot(*parts), LATER)
            compared = list({(x.kind, x.name): x for x in [*compared, *more]}.values())
    finally:
        snapshot.put_back()
    return Verified(tuple(in_order(compared, core.variants.current.captured)))


def _compared(
    subject: Subject, batch: Any, snapshot: Snapshot, why: str
) -> tuple[list[Compared], bool]:
    """Compare one step, which is taken back; and whether it has made states where there were none."""
    planned = run_planned(subject, batch, snapshot)
    snapshot.rewind()
    comparison = _Comparison(subject, batch, planned)
    captured = subject.core.variants.current.captured
    text = failure_text(comparison.repeated(), captured, CHANGES)
    compared = [] if text else comparison.compared()
    text = text or failure_text(compared, captured, why)
    for each in filter(None, gathered(subject.core.setting.world, "differences", lambda: text)):
        raise VerificationError(each)
    return compared, comparison.began


@final
class _Comparison:
    """The plan's step and a plain one, and how far a plain one moves with its parameters."""

    def __init__(self, subject: Subject, batch: Any, planned: Planned) -> None:
        self._subject, self._planned = subject, planned
        self._captured = subject.core.variants.current.captured
        returned = self._captured.outputs
        places, _ = flatten(unflatten(list(range(len(returned.leaves))), returned.tree), "output")
        leaves = [(path, returned.leaves[place]) for path, place in places]
        self._keys = {path: leaf for path, leaf in leaves if isinstance(leaf, str)}
        self._numbers = frozenset(path for path, leaf in leaves if isinstance(leaf, Number))
        self._parameters = dict(subject.core.setting.model.named_parameters())
        precision = subject.core.setting.options.precision or Precision()
        eps = coarsest(self._captured.graph, precision.reduce)
        # Both steps begin with these.
        variables = named_variables(subject.core.setting.model)
        self._tensors = wholes(variables)
        self._masters = subject.core.training.masters.whole(variables)
        self._states = states(subject)
        self._batch = whole_batch(subject, batch)
        setting = subject.core.setting
        self._step = PlainStep(
            subject.core.step,
            Casts(precision.compute, precision.parameters, setting.placement.device_type),
            subject.core.compiled.graph.micro_batches,
            draws_of(self._captured.graph),
            setting.seed,
            subject.number,
            subject.scale,
        )
        self._plain = self._run(self._tensors)
        # By kind and name, how far a rounding of all parameters moves it.
        self._noise: dict[tuple[str, str], float] = {}
        self._rounding = Rounding(eps)
        self._plain_gradients: dict[str, Tensor] = self._of_kind("gradient")
        most = max(map(largest, self._plain_gradients.values()), default=0.0)
        self._of_gradients = Rounding(eps, eps * most)

    @property
    def began(self) -> bool:
        """True if the step has made states of a parameter that had none."""
        return any(key not in self._states for key in self._planned.states)

    def repeated(self) -> list[Compared]:
        """The results of the plain step, run a second time, compared with those of the first."""
        again = self._run(self._tensors)
        by = Rounding(_REPEATED * self._rounding.eps, self._of_gradients.least)
        return [
            compare(kind, self._name(kind, name), again[kind, name], value, 0.0, by)
            for (kind, name), value in self._plain.items()
            if isinstance(value, Tensor) and isinstance(again.get((kind, name)), Tensor)
        ]

    def compared(self) -> list[Compared]:
        """Everything that a plain step gives; what differs is compared again after more movements: few turn a ReLU."""
        self._move(0)
        found = self._every()
        if not all(each.agrees for each in found):
            for seed in range(1, _MOVEMENTS):
                self._move(seed)
            found = self._every()
        return found

    def _run(self, values: dict[str, Tensor]) -> Results:
        found = self._step.run(values, self._batch)
        return {place: self._comparable(*place, x) for place, x in found.items()}

    def _comparable(self, kind: str, path: str, value: Any) -> Any:
        """A result; a tensor in place of a number that the step has read from one."""
        if kind == "output" and path in self._numbers:
            return torch.tensor(value, dtype=_WIDEST.get(type(value)))
        return value

    def _of_kind(self, kind: str) -> dict[str, Any]:
        return {name: x for (each, name), x in self._plain.items() if each == kind}

    def _move(self, seed: int) -> None:
        shifted = self._run(moved(self._tensors, self._parameters, self._rounding.eps, seed))
        for place, value in self._plain.items():
            other = shifted.get(place)
            if not isinstance(value, Tensor) or not isinstance(other, Tensor):
                continue
            if value.shape == other.shape:
                apart = difference(other, value)
                if apart < float("inf"):
                    self._noise[place] = max(apart, self._noise.get(place, 0.0))

    def _every(self) -> list[Compared]:
        # The keys of the parameters that optimizers update, in the plan or plainly.
        groups = [g for each in self._subject.core.step.optimizers.each for g in each.param_groups]
        owned = {id(parameter) for group in groups for parameter in group["params"]}
        having = {**self._plain_gradients, **(self._planned.gradients or {})}
        updated = [k for k, p in self._parameters.items() if id(p) in owned and k in having]
        found = [*self._outputs(), *self._not_updated(set(updated))]
        gradients = self._planned.gradients
        for key in updated if gradients is not None else ():
            one, expected = (gradients or {}).get(key), self._plain_gradients.get(key)
            noise = self._noise.get(("gradient", key), 0.0)
            found.append(compare("gradient", key, one, expected, noise, self._of_gradients))
        if not self._planned.skipped:
            found += [*self._metrics(updated), *self._updates(updated)]
        return found

    def _outputs(self) -> Iterator[Compared]:
        outputs, plain = self._planned.outputs.items(), self._of_kind("output")
        found = {path: self._comparable("output", path, x) for path, x in outputs}
        if list(found) != list(plain):
            text = f"has the entries {list(found)} in the plan, and {list(plain)} in the plain step"
            yield Compared("output", "output", text=text)
            return
        for path in plain:
            name, noise = self._name("output", path), self._noise.get(("output", path), 0.0)
            yield compare("output", name, found[path], plain[path], noise, self._rounding)

    def _name(self, kind: str, path: str) -> str:
        return self._keys.get(path, path) if kind == "output" else path

    def _not_updated(self, updated: set[str]) -> Iterator[Compared]:
        graph = self._captured.graph
        copies = {each.target.name for each in graph.of_kind(Update) if each.rule == "copy"}
        written = {node.key for node in graph.of_kind(Input) if node.value.name in copies}
        for key, expected in self._of_kind("buffer").items():
            if key not in updated:
                kind = "parameter" if key in self._parameters else "buffer"
                noise = self._noise.get(("buffer", key), 0.0) if key in written else 0.0
                found = self._planned.tensors[key]
                yield compare(kind, key, found, expected, noise, self._rounding)

    def _metrics(self, updated: list[str]) -> Iterator[Compared]:
        plain = self._plain_gradients
        own = {key: plain[key] for key in updated if key in plain}
        noise = sum(
            self._noise.get(("gradient", k), 0.0) * x.numel() ** 0.5 for k, x in own.items()
        )
        for name, found in self._planned.metrics.items():
            norm = torch.nn.utils.get_total_norm(own.values()).to(found.dtype)
            text = f"metrics[{name!r}]"
            yield compare("output", text, found, norm, noise, self._of_gradients)

    def _updates(self, updated: list[str]) -> Iterator[Compared]:
        planned = self._planned.gradients
        gradients = self._plain_gradients if planned is None else planned
        own = {key: gradients[key] for key in updated if key in gradients}
        made = {
            f"{key}.{name}": value
            for key in own
            for name, value in self._planned.states.get(key, {}).items()
        }
        if not own or not all(bool(each.isfinite().all()) for each in own.values()):
            return
        yield from PlainUpdate(
            self._subject.core.step.optimizers.each,
            self._parameters,
            {**self._of_kind("buffer"), **self._masters},
            self._states,
            own,
            {
                key: self._of_gradients.of(largest(x), self._noise.get(("gradient", key), 0.0))
                for key, x in own.items()
            },
            self._subject.core.setting.options.clip_norm,
        ).compared(self._planned.tensors, made, self._rounding)


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
        tensors: parameters and buffers, after the step; `states` of the optimizer, by parameter and name.
        skipped: true if there was no update, as a gradient was not finite.
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
