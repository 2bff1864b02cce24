"""The user's step as one functional fx graph: forward, loss and gradients, on tensors without data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from weft.capture.batch import BatchSpec, OutputSpec
from weft.capture.fx.checks import check_dtypes, check_ops
from weft.capture.fx.locations import locate, location_of
from weft.capture.fx.private import (
    FakeMode,
    UnwritableView,
    fake_mode,
    fake_tensor,
    functional,
    is_fake,
    noted_copies,
    trace,
    trace_like,
)
from weft.capture.fx.refusals import refuse, refuse_op, refuse_write
from weft.capture.fx.retrace import Skeleton, skeleton
from weft.capture.ops.decompositions import decompositions, fallback, overwrites, strided
from weft.capture.python.caches import take_caches
from weft.capture.python.symbolic import SymbolicNumber, SymbolicNumbers
from weft.capture.python_guards import Guard, PythonGuards
from weft.capture.tracing.leaks import FakeTensorLeaks
from weft.capture.tracing.runs import Found, trace_run, with_numbers
from weft.capture.tracing.step_call import Casts, LossFunction, ModelTensors, StepCall
from weft.errors import WeftError

_GIVEN = (
    "reads a tensor from outside, to which a backward() inside of the step's backward adds a gradient; a graph "
    "cannot do that; make it a parameter of the model, or detach() it where it is read"
)
_UNSEEN = (
    "reads a tensor that the step has made where the trace does not see it, such as in another thread; expected "
    "all tensor code in the thread that calls the loss function"
)


@final
@dataclass(frozen=True)
class Skeletons:
    """Light copies (for other shapes) of a step's trace, and of its functional form if that differs."""

    step: Skeleton
    functional: Skeleton | None = None


@final
@dataclass(frozen=True)
class Traced:
    """The findings of a trace.

    Attributes:
        graph: functional fx graph. Inputs: parameters, buffers, tensors of the batch, constants.
            Its output is a list: the tensors that the loss function returned, then the gradients.
        outputs: how to build what the loss function returned.
        output_keys: keys of the returned tensors.
        gradients: names of the parameters that have a gradient.
        constants: tensors from outside of model and batch, in order.
        recurrent: names of the parameters of recurrent layers.
        watch: values of Python that the step depends on.
        skeletons: for a trace for other shapes.
        numbers: that change between steps, by the positions of the constants that stand for them.
    """

    graph: torch.fx.Graph
    outputs: OutputSpec
    output_keys: tuple[str, ...]
    gradients: tuple[str, ...]
    constants: tuple[torch.Tensor, ...]
    recurrent: frozenset[str]
    watch: PythonGuards
    skeletons: Skeletons
    numbers: Mapping[int, SymbolicNumber]


def trace_step(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    variables: ModelTensors,
    batch: BatchSpec,
    example: Mapping[str, torch.Tensor],
    device: str,
    training: bool,
    casts: Casts | None = None,
    apart: Collection[str] = (),
    like: Skeletons | None = None,
    changing: Sequence[Guard] = (),
    left: FakeTensorLeaks | None = None,
) -> Traced:
    """Trace `loss_fn(model, batch)` and, when `training`, the gradients of its loss.

    The forward runs under `casts`; with "fp16" the gradients start from `weft.loss_seed`. Recurrent layers with a
    parameter in `apart` are decomposed. With the skeletons of a trace for other shapes it is faster, where this one
    is like that. Numbers in the places `changing` become constants that are written before every step, where the step
    counts with them. Tensors without data that it leaves somewhere are noted in `left`.

    Raises:
        CaptureError: naming the user's line, when the step cannot be one graph.
    """
    mode = fake_mode()
    left = left or FakeTensorLeaks()
    left.begin(mode)
    table = {**fallback(), **decompositions()}

    def begin(numbers: SymbolicNumbers | None = None) -> tuple[StepCall, Any]:
        cast = casts or Casts(device=device)
        step = StepCall(model, loss_fn, variables, batch, training, cast, left, apart, numbers)
        inputs = (
            # In evaluation too, for those who ask; no gradients are made there.
            [fake_tensor(mode, p, device, p.requires_grad) for p in variables.parameters.values()],
            [fake_tensor(mode, b, device) for b in variables.buffers.values()],
            [fake_tensor(mode, x, device) for x in example.values()],
        )
        return step, inputs

    def alike(step: StepCall, inputs: Any, again: bool) -> torch.fx.GraphModule | None:
        return trace_like(None if again or not like else like.step, step, inputs, mode, table)

    def wholly(step: StepCall, inputs: Any, again: bool) -> torch.fx.GraphModule | None:
        try:
            return trace(step, inputs, mode, table, step.values_read)
        except WeftError:
            raise
        except Exception as error:
            raise refuse(error, step.failed_at) from error

    found = (trace_run(alike, begin) if like else None) or trace_run(wholly, begin)
    assert found is not None  # `_trace` raises
    leaves = list(found[1].constants())
    containers = [each for each in leaves if isinstance(each.value, list | tuple | dict)]
    # If something takes no stand-in for one entry of the batch, others are followed all the same.
    for of_batch in (leaves, containers, []):
        numbers = SymbolicNumbers(changing, of_batch)
        if numbers.entries:
            plain, found = found, with_numbers(numbers, found, begin, wholly)
            if found is not plain:
                break
    return _described(found, numbers, mode, like)


def _described(
    found: Found, numbers: SymbolicNumbers, mode: FakeMode, like: Skeletons | None
) -> Traced:
    """The findings of a trace: its graph without writes in place, and what is beside it."""
    module, step, inputs = found
    whole = skeleton(module.graph)
    if step.caches:
        take_caches(module, step.caches, step.left.dependent())
    copies = noted_copies(module.graph)
    locate(module.graph)
    check_ops(module.graph, copies)
    check_dtypes(module.graph)
    constants = _lift_constants(module, mode)
    flat = [x.detach() for part in inputs for x in part]
    flat += [mode.from_tensor(constant) for constant in constants]
    expected = like.functional if like else None
    try:
        plain = functional(module, flat, mode, {**strided(), **overwrites()}, expected)
    except UnwritableView as view:
        raise refuse_write(view) from None
    assert step.outputs is not None  # set by running it
    return Traced(
        plain.graph,
        step.outputs,
        step.output_keys,
        step.gradients,
        constants,
        step.recurrent,
        PythonGuards((*step.watch.settled(constants).entries, *step.outcomes)),
        Skeletons(whole, None if plain is module else skeleton(plain.graph)),
        numbers.positions(constants),
    )


def _lift_constants(module: torch.fx.GraphModule, mode: FakeMode) -> tuple[torch.Tensor, ...]:
    """Turn tensors from outside into inputs of the graph, after the others; a tensor read twice is one input."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    lifted: dict[int, tuple[torch.Tensor, torch.fx.Node]] = {}
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        tensor = getattr(module, node.target)
        if not isinstance(tensor, torch.Tensor):
            user = next(iter(node.users), node)
            reason = f"takes a {type(tensor).__name__}; expected tensors and plain constants"
            raise refuse_op(user.target, location_of(user), reason)
        if is_fake(tensor):
            user = next(iter(node.users), node)
            raise refuse_op(user.target, location_of(user), _UNSEEN)
        if id(tensor) not in lifted:
            with graph.inserting_after(last[0]) if last else graph.inserting_before():
                last = [graph.placeholder(f"constant{len(lifted)}")]
            last[0].meta["val"] = mode.from_tensor(tensor)
            lifted[id(tensor)] = (tensor, last[0])
        node.replace_all_uses_with(lifted[id(tensor)][1])
        graph.erase_node(node)
    given = [(x, node) for x, node in lifted.values() if x.is_leaf and is_fake(x.grad)]
    for tensor, _ in given:
        tensor.grad = None
    for _, node in given:
        user = next(iter(node.users), node)
        raise refuse_op(user.target, location_of(user), _GIVEN)
    return tuple(tensor for tensor, _ in lifted.values())
