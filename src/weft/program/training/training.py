"""The state that a program keeps between steps, beside its plans: of optimizers, FP32 main parameters, gradients that
stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor

from weft.capture.optimizer_groups import Optimizers
from weft.capture.optimizers.attributes import is_foreign
from weft.capture.optimizers.trials import count_steps, counters_of
from weft.compiler.pipeline import Compiled
from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Update
from weft.program.agreement import run_on_all
from weft.program.live.updated import agree, updated
from weft.program.planning.variants import Variants
from weft.program.setting import ProgramSetting
from weft.program.training.gradients import Gradients
from weft.program.training.states import MainParameters, States, check_states
from weft.runtime.memory.heap import defragment


@final
class Training:
    """The states, FP32 main parameters and gradients of a program; a program that evaluates has none."""

    def __init__(self, setting: ProgramSetting, optimizers: Optimizers) -> None:
        self._setting = setting
        self.optimizers = optimizers
        self.states = tuple(States(optimizers, each, setting.variables) for each in optimizers.each)
        self.gradients = Gradients(setting, optimizers)
        self.masters = MainParameters(setting.variables)
        # Of steps without an update, or what makes them.
        self._adding: Variants | Callable[[], Variants] | None = None

    def add_plan(self, compiled: Compiled) -> None:
        """A plan is to run. Every process must call it, and raises UserError as `check_states` does."""
        if not self.optimizers:
            return
        model, graph = self._setting.model, compiled.graph

        def check() -> None:
            check_states(model, self.optimizers, graph)
            check_step_hooks(self.optimizers, graph)

        agree(self.optimizers.each)
        run_on_all(self._setting.world, "the states of the optimizers", check)
        self.masters.add_plan(graph)
        members = list(updated(model, graph))
        for each in self.states:
            each.add_plan(members)
        self.gradients.add_plan(compiled, members)

    def take(self) -> None:
        """Take over what the user has written since the last step; some microseconds when that is nothing."""
        for each in self.states:
            each.take()
        self.masters.take()

    def show(self, graph: LogicalGraph, updated: Collection[str] | None, room: int) -> None:
        """Show the user what a step has made, where it will stay; after an update, schedulers and hooks see it.

        Some microseconds when nothing is new. Ranks of this process may have run none of an optimizer's updates.

        Args:
            updated: the parameters that the step has updated, on whatever rank; None for a step without an update.
            room: bytes that copies of all new states may take, which move to one place. Tensors of third-party
                optimizers stay, as such optimizers may hold views of them.

        Raises:
            UserError: a hook reads a gradient, which an update has used.
        """
        new = (each.made() for each in self.states if not is_foreign(each.optimizer))
        made = [tensor for every in new for tensor in every]
        if made:
            defragment(made, room)
        for each in self.states:
            each.show(updated or (), surely=not self.gradients.skips)
            if updated is not None:
                each.optimizer._opt_called = True  # type: ignore[attr-defined]
                count_steps(each.optimizer)
        if updated is not None:
            check_step_hooks(self.optimizers, graph)
            call_step_hooks(self.optimizers)

    def adds_by(self, variants: Variants | Callable[[], Variants]) -> None:
        """The variants of the step without an update, or what makes them when they are first wanted."""
        self._adding = variants

    def adding(self, enter: Callable[[str], object]) -> Variants:
        """The variants of the step without an update; `enter` is told before the first one is planned."""
        if callable(self._adding):
            enter("plan of steps that add")
            self._adding = self._adding()
        assert self._adding is not None  # said by who made the program
        return self._adding

    def constants(self) -> Iterator[Tensor]:
        """Tensors of elsewhere that plans of steps without an update read."""
        return self._adding.constants() if isinstance(self._adding, Variants) else iter(())

    def close(self, but: Variants) -> None:
        """End all threads of it but those of the steps with an update."""
        self.gradients.close()
        if isinstance(self._adding, Variants) and self._adding is not but:
            self._adding.close()


# Hooks that users put after an optimizer's step: called when a program has updated, on the live model.
#
# Private API: `_optimizer_step_post_hooks`, where `register_step_post_hook` keeps them, and the arguments that torch's
# wrapper of `step` calls them with.


_HOOKS = "_optimizer_step_post_hooks"
_Grad: Any = Tensor.grad


def check_step_hooks(optimizers: Optimizers, graph: LogicalGraph) -> None:
    """Raise UserError where a step may leave its updates out, and hooks after it, or counters, would continue."""
    if not any(each.skip for each in graph.of_kind(Update)):
        return
    for each in optimizers.each:
        counters = sorted(map(str, counters_of(each)))
        if counters:
            raise UserError(
                f'{type(each).__name__} counts its steps ({counters[0]}), and a scaled loss (precision "fp16"): a step '
                "that overflows makes no update, and would be counted all the same. Count in self.state[param], or use "
                "bf16"
            )
    if any(map(_hooks, optimizers.each)):
        raise UserError(
            'a hook by register_step_post_hook and a scaled loss (precision "fp16"): a step that overflows makes no '
            "update, and the hook would be called all the same. Take the hook away, and do between steps what it does, "
            "or use bf16"
        )


def call_step_hooks(optimizers: Optimizers) -> None:
    """Call the hooks after the steps of the optimizers, each with the user's optimizer, whose tensors are live.

    Raises:
        UserError: one reads a gradient, which an update has used: a hook that leaves out parameters without one would
            leave out all.
    """
    for each in optimizers.each:
        hooks = _hooks(each)
        if not hooks:
            continue
        own = {id(parameter) for group in each.param_groups for parameter in group["params"]}
        kind = type(each).__name__

        def checked(tensor: Tensor, own: set[int] = own, kind: str = kind) -> Any:
            found = _Grad.__get__(tensor)
            if found is None and id(tensor) in own:
                raise UserError(
                    f"a hook by register_step_post_hook of {kind} reads parameter.grad, which a step with an update "
                    "does not leave. For gradients: program.step(batch, update=False), then read them, then "
                    "optimizer.step(), which calls the hook too"
                )
            return found

        with patch.object(Tensor, "grad", property(checked, _Grad.__set__, _Grad.__delete__)):
            for hook in hooks:
                hook(each, (each,), {})


@contextmanager
def without_step_hooks(optimizers: Optimizers) -> Iterator[None]:
    """Within the context, there are no hooks after the steps of the optimizers."""
    with ExitStack() as stack:
        for each in optimizers.each:
            if _hooks(each):
                stack.enter_context(patch.object(each, _HOOKS, OrderedDict()))
        yield


def _hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    return list(getattr(optimizer, _HOOKS, {}).values())
