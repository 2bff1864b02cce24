"""Runs of a step under a trace: once, once more where it changes values of Python, and with numbers as tensors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from weft.capture.fx.generators import generators_followed
from weft.capture.fx.locations import module_paths_noted
from weft.capture.fx.private import masks_unread
from weft.capture.hint import hints_recorded
from weft.capture.numbers.changing import ChangingNumbers, plain_number
from weft.capture.numbers.later import forget_numbers, forget_refused
from weft.capture.numbers.spies import spied
from weft.capture.python.changes import depends_on, keeps
from weft.capture.python.rewriting.rewrites import labels_ignored
from weft.capture.tracing.before import restored
from weft.capture.tracing.same import same_but_for, same_graph
from weft.capture.tracing.step_call import StepCall
from weft.capture.watch import MISSING, Entry

# Gives a new step and its inputs.
Begin: TypeAlias = "Callable[[], tuple[StepCall, Any]]"
# Traces a step, given its inputs and whether it is run once more; None where it cannot.
Run: TypeAlias = "Callable[[StepCall, Any, bool], torch.fx.GraphModule | None]"
# What it gives, with the step and its inputs.
Found: TypeAlias = "tuple[torch.fx.GraphModule, StepCall, Any]"


def traced(run: Run, begin: Begin) -> Found | None:
    """The trace of a step, with the step and its inputs; None where `run` finds none. What the step wrote is put back.

    A step that has changed a value of Python which it could have read, or has kept a tensor outside of the model, is
    traced once more, from there: only where that gives the same graph, every step is the one that was captured.

    Raises:
        CaptureError: naming what the step changes or keeps, where that makes another step of it.
    """
    step, inputs = begin()
    with restored(step.model, step.loss_fn) as before:
        step.around = before
        with _running(step):
            module = run(step, inputs, False)
        if module is not None:
            step.left.traced(module)
            changes = step.recorder.changes()
            kept = before.kept()
            if changes or kept or step.made:
                module = _traced_again(run, begin, step, module, changes, kept)
    if module is None:
        left = step.left
        del step, inputs  # or what they hold would be looked for in all that is alive
        left.drop()
        forget_refused()
        return None
    return module, step, inputs


def _traced_again(
    run: Run,
    begin: Begin,
    step: StepCall,
    module: torch.fx.GraphModule,
    changes: list[Entry],
    kept: Mapping[int, str],
) -> torch.fx.GraphModule | None:
    """`module`, where the step gives it once more from what it has left; None where `run` finds nothing then.

    Numbers of the `changes` are counted on, and may not be read; of what the step has kept it may read what is made
    of constants and shapes, which each step makes anew.
    """
    changed = [*changes, *(replace(each, value=MISSING) for each in step.made)]
    refused = depends_on(changed) if changed else keeps(next(iter(kept.values())))
    with spied(changes) as reads:
        again, inputs = begin()
        again.around = step.around
        try:
            with _running(again):
                other = run(again, inputs, True)
        except Exception as error:
            if again.recorder.counted:
                raise
            raise refused from error
    if reads:
        raise refused
    if other is None:
        return None
    cached = step.left.read(other, kept)
    if not changes and cached:
        return module
    results = len(step.output_keys) + len(step.gradients)
    same = same_graph(module, other, step.left.maker, results)
    if not same or again.outputs != step.outputs:
        raise refused
    return module


def with_numbers(
    numbers: ChangingNumbers,
    plain: Found,
    begin: Callable[[ChangingNumbers], tuple[StepCall, Any]],
    run: Run,
) -> Found:
    """The trace of a step that takes some numbers from tensors, where it is like `plain`; else that."""
    module, before, _ = plain
    with restored(before.model, before.loss_fn) as around, numbers.placed():
        step, inputs = begin(numbers)
        step.around = around
        try:
            with _running(step):
                other = run(step, inputs, True)
        except Exception:  # something takes numbers only
            return plain
    now = {key: plain_number(number) for key, (_, number) in numbers.tensors.items()}
    if other is None or not same_but_for(module, other, now):
        return plain
    step.left.traced(other)
    return other, step, inputs


@contextmanager
def _running(step: StepCall) -> Iterator[None]:
    """While this lasts, the step may be run on fake tensors; inside of `restored`, which puts back what it writes."""
    forget_numbers()
    if not step.training:
        # Before reading is noted: a model may look at the mode that it is in.
        step.model.eval()
    with (
        hints_recorded(),
        step.recorder.recording(),
        module_paths_noted(step.model),
        labels_ignored(),
        masks_unread(),
        generators_followed(),
        _compiled_parts_eager(),
        torch.set_grad_enabled(step.training),
    ):
        yield
        step.left.numbers()


@contextmanager
def _compiled_parts_eager() -> Iterator[None]:
    """While this lasts, what the user compiled with `torch.compile` runs as it was written."""
    dynamo = sys.modules.get("torch._dynamo.config")
    if dynamo is None:  # nothing was; it takes seconds to import
        yield
        return
    allowed = dynamo.patch(error_on_nested_fx_trace=False)
    with allowed, torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # It means `module_paths_noted`, which the wrapper's own call does not disturb.
        warnings.filterwarnings("ignore", "Using `torch.compile")
        yield
