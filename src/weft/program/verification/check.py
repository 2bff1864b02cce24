"""`Program.verify`: one step of the plan and one plain step on copies, and what both give compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from weft.capture.batch import Number
from weft.capture.tracing.step_call import Casts
from weft.capture.tree import flatten, unflatten
from weft.errors import VerificationError
from weft.ir.logical import Input, Update
from weft.program.agreement import gathered
from weft.program.live.ownership import named_variables
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
from weft.program.verification.planned import (
    Planned,
    Snapshot,
    Subject,
    check_values,
    run_planned,
    states,
    whole_batch,
)
from weft.strategy.precision import Precision

# How often parameters are moved where something differs.
_MOVEMENTS = 6
# How many times as much as sums in another order a step may change when it runs again, where kernels
# add up in any order.
_REPEATED = 8
# Dtypes in which Python holds numbers that are rounded.
_WIDEST = {float: torch.float64, complex: torch.complex128}


def verified(subject: Subject, batch: Any) -> Verified:
    """Compare a step of the plan with a plain one; the program is afterwards as it was.

    Where that is the step in which states begin, the next one is compared, too: it is the first to go by them.

    Every process must call it, and all raise alike.

    Raises:
        VerificationError: naming the first result that differs.
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
