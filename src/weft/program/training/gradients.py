"""Gradients that stay: `parameter.grad` after a step without an update, and the plan of an update that reads them."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from weft.capture.optimizer_groups import Optimizers
from weft.compiler.pipeline import Compiled
from weft.compiler.training.gradients import METRIC
from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import ROLES, Input, Ref, Update, Value
from weft.program.live.updated import Updated
from weft.program.live.variables import by_placement, of_rank
from weft.program.planning.build import build, close_all, compiled_like
from weft.program.setting import ProgramSetting
from weft.program.training.states import follow
from weft.runtime.executor.rank_executor import RankExecutor

_log = logging.getLogger("weft")
_gradient = attrgetter("grad")


def check_adding(graph: LogicalGraph, update: bool) -> None:
    """Raise UserError unless gradients of steps may be added up; `update`: a step is to update by their sum."""
    where = "step(…, update=False)"
    updates = [each for each in graph.of_kind(Update) if each.rule != "copy"]
    if not updates:
        raise UserError(
            f"{where} keeps gradients, but this program has no optimizer; call step(batch), or compile with optimizer="
        )
    if all(each.skip is None for each in updates):
        return
    if update:
        raise UserError(
            'a step with a scaled loss (precision "fp16") found gradients in parameter.grad, which it cannot add '
            "to: an overflow would have to skip them, too; call optimizer.zero_grad() before, or use bf16"
        )
    raise UserError(
        f'{where} with a scaled loss (precision "fp16"): an overflow would have to skip all '
        "steps whose gradients are added up; use micro_batches= in the strategy, or bf16"
    )


# So many plans of updates are kept; the oldest one goes.
MOST = 16


@final
class Gradients:
    """The gradients of the parameters that a program updates."""

    def __init__(self, setting: ProgramSetting, optimizers: Optimizers) -> None:
        self._setting = setting
        self._optimizers = optimizers
        self._members: dict[str, Updated] = {}
        # Plans of steps, and the keys of the parameters that each updates.
        self._steps: list[tuple[Compiled, frozenset[str]]] = []
        # Plans of updates, by the keys of the parameters that have a gradient.
        self._plans: dict[tuple[str, ...], dict[int, RankExecutor]] = {}
        # All parameters that may have a gradient for the optimizers, by name.
        self._parameters: dict[str, Tensor] = {}
        # Gradients that an optimizer has used, or that stood when the model was compiled, and their
        # versions: a loop clears such before it continues.
        self._used: dict[str, tuple[Tensor, int]] | None = None
        # Parameters that get no gradient here, though `backward()` might give one; None until it is said.
        self._left_out: list[str] | None = None
        # True if steps have left gradients that no update has used.
        self.open = self._said = False
        # True if the updates of a step may be skipped, as an overflow wants it.
        self.skips = False
        for optimizer in optimizers.each:
            _trained.setdefault(optimizer, WeakSet()).add(self)

    def add_plan(self, compiled: Compiled, updates: Iterable[Updated]) -> None:
        """The plan of a step is to run, which updates these parameters."""
        members = {each.key: each for each in updates}
        # The last plan knows the groups that parameters are in now.
        self._steps.insert(0, (compiled, frozenset(members)))
        self.skips = any(each.skip for each in compiled.graph.of_kind(Update))
        self.close()
        self._members |= members
        every = {id(p) for _, _, group in self._optimizers.groups() for p in group["params"]}
        named = self._setting.model.named_parameters()
        self._parameters = {key: p for key, p in named if key in self._members or id(p) in every}
        if self._used is None:
            self.note_used()

    def note_used(self) -> None:
        """Note that the present `parameter.grad` has been used: the next step begins without, unless more is added."""
        given = ((key, p.grad) for key, p in self._parameters.items())
        self._used = {key: (x, x._version) for key, x in given if x is not None}

    def clear_used(self) -> None:
        """Let gradients be None that an optimizer has used and nobody has changed since, as `zero_grad` does."""
        for key, (gradient, version) in (self._used or {}).items():
            parameter = self._parameters.get(key)
            same = parameter is not None and parameter.grad is gradient
            if parameter is not None and same and gradient._version == version:
                parameter.grad = None
        self._used = {}

    def standing(self) -> bool:
        """True if there are gradients in `parameter.grad`; some microseconds."""
        # Otherwise torch asks the class of each global tensor how it gives its gradient.
        with torch._C.DisableTorchFunction():
            return not all(map(is_, map(_gradient, self._parameters.values()), repeat(None)))

    def check_update(self, compiled: Compiled) -> None:
        """Raise UserError where a parameter has a gradient, in `parameter.grad` or from a step, that no step updates.

        Says once that a step adds to gradients that no step has left.
        """
        given = self.keys()
        self._graded((*given, *self.updated_by(compiled)))
        if not self.open and not self._said:
            self._said = True
            _log.warning(
                "program.step adds to the gradients that eager code has left in parameter.grad, such as that of %s, as "
                "backward() would; if you do not want them, call optimizer.zero_grad() before",
                min(given),
            )

    def take(self) -> None:
        """Let the ranks add to what is in `parameter.grad` now; what nobody has written stays as wide as it is."""
        for member in self._members.values():
            laid = member.parameter.grad
            if laid is not None:
                laid = member.gradient_laid(laid, member.inputs[0].shares)
            for rank, variables in self._setting.variables.items():
                wider = variables.gradients.pop(member.key, None)
                if laid is not None and member.key in variables:
                    part = of_rank(laid, rank).detach()
                    if wider is not None and wider.dtype != member.parameter.dtype:
                        follow(wider, part.to(member.parameter.dtype))
                        part = wider
                    variables.gradients[member.key] = part

    def show(self, compiled: Compiled) -> None:
        """Let `parameter.grad` be what the ranks have added up in a step; the same memory."""
        for member in map(self._members.__getitem__, self.updated_by(compiled)):
            every = by_placement(self._setting.variables, member.parameter)
            parts = [x.gradients[member.key] for x in every if member.key in x.gradients]
            member.parameter.grad = member.gradient_shown(parts)
        self.open = True
        if self._left_out is None:
            named = self._setting.model.named_parameters()
            trained = (key for key, p in named if p.requires_grad)
            self._left_out = [key for key in trained if key not in self._parameters]
            if self._left_out:
                _log.warning(
                    "steps leave no gradient in parameter.grad of %s: no optimizer of the program has it, though it "
                    "requires grad; if you want it, give the parameter to an optimizer, in a group with lr=0",
                    ", ".join(self._left_out[:5]),
                )

    def keys(self) -> tuple[str, ...]:
        return tuple(key for key, p in self._parameters.items() if p.grad is not None)

    @property
    def text(self) -> str:
        """The gradients in `parameter.grad`, as text, the same on all ranks that have gradients alike."""
        keys = self.keys()
        return f"{len(keys)} gradients ({zlib.crc32(' '.join(keys).encode()):08x})"

    def executors(self) -> dict[int, RankExecutor]:
        """The executors of an update by the gradients in `parameter.grad`; raises UserError where it can use none."""
        keys = self.keys()
        if not keys:
            raise UserError(
                "program.update() found no gradients; make a step(batch, update=False) before, or call backward() on "
                "a loss of the live model"
            )
        if keys not in self._plans:
            if len(self._plans) == MOST:
                close_all(self._plans.pop(next(iter(self._plans))))
            # Steps may update different parameters: of each the update counts that the last such plan has.
            members = self._graded(keys)
            leaves = {f"{each.key}.grad": each.gradient.laid for each in members}
            laid = [node for each in members for node in each.inputs]
            compiled = compiled_like(
                self._setting, self._steps[0][0], _update_graph(members), leaves, True, laid
            )
            self._plans[keys] = build(self._setting, {}, compiled, self._optimizers)
        return self._plans[keys]

    def update(self, executors: Mapping[int, RankExecutor]) -> dict[str, Tensor]:
        """One update by what is in `parameter.grad`, which is None afterwards; the metrics that were asked for."""
        self.take()
        feeds: dict[int, dict[str, Any]] = {rank: {} for rank in self._setting.variables}
        for key, member in self._members.items():
            gradient = member.parameter.grad
            if gradient is None:
                continue
            # Interleaved parameters are fed in the usual order.
            shared = member.inputs[0].shares is not None
            ordered: Any = member.gradient_laid(gradient, None) if shared else None
            for rank, variables in self._setting.variables.items():
                if key in variables:
                    part = of_rank(ordered, rank) if shared else variables.gradients[key]
                    feeds[rank][f"{key}.grad"] = part
        results = self._setting.run(lambda rank: executors[rank].step(feeds[rank]))
        self.drop()
        return {key.removeprefix(METRIC): x for key, x in results.items()}

    def drop(self) -> None:
        for key, member in self._members.items():
            member.parameter.grad = None
            for variables in self._setting.variables.values():
                variables.gradients.pop(key, None)
        self.open = False

    def close(self) -> None:
        """End the plans of updates, of which one may have failed: the next update makes its own."""
        for executors in self._plans.values():
            close_all(executors)
        self._plans.clear()

    def updated_by(self, step: Compiled) -> frozenset[str]:
        return next((keys for compiled, keys in self._steps if compiled is step), frozenset())

    def _graded(self, keys: Collection[str]) -> list[Updated]:
        """The updates of these parameters, by the optimizers and groups that they are in now."""
        groups = {id(p): n for _, n, group in self._optimizers.groups() for p in group["params"]}
        for key in keys:
            member = self._members.get(key)
            if member is None or groups.get(id(member.parameter)) != member.update.group:
                raise UserError(
                    f"{key} has a gradient, but no step of this program updates it; optimizer.step() uses all "
                    "gradients that there are, or set its .grad to None"
                )
        return [self._members[key] for key in keys]


def _update_graph(members: Sequence[Updated]) -> LogicalGraph:
    variables, fed, updates = [], [], []
    for each in members:
        value = Value(f"{each.key}.grad.fed", each.gradient.shape, each.gradient.dtype)
        fed.append(Input(value, "batch", f"{each.key}.grad"))
        # Plans may name them differently; their keys are the same.
        for node in each.inputs:
            bare = Value(node.key, node.value.shape, node.value.dtype)
            variables.append(replace(node, value=bare))
        target, *states = (Ref(node.key) for node in each.inputs)
        update = replace(each.update, target=target, states=tuple(states), source=value.ref)
        updates.append(replace(update, skip=None))
    variables.sort(key=lambda node: ROLES.index(node.role))
    return LogicalGraph("update", (*variables, *fed, *updates))


# Who is told of the steps of an optimizer that eager code makes.
_trained: WeakKeyDictionary[torch.optim.Optimizer, WeakSet[Gradients]] = WeakKeyDictionary()


def _stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for each in _trained.get(optimizer, ()):
        each.note_used()


_stepped.notes_use = True  # type: ignore[attr-defined]
register_optimizer_step_post_hook(_stepped)
