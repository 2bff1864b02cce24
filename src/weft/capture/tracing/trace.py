"""The user's step as one functional fx graph: forward, loss and gradients, on tensors without data."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import torch

from weft.capture.batch import BatchSpec, TensorLeaf
from weft.capture.fx.checkpoints import checkpoints_noted
from weft.capture.fx.locations import (
    LinesNoted,
    backward_noted,
    locate,
    location_of,
    module_paths_noted,
)
from weft.capture.fx.private import (
    Decompositions,
    FakeMode,
    fake_mode,
    fake_tensor,
    functional,
    mark_backward,
    noted_copies,
    running_sequence,
    trace,
    trace_like,
)
from weft.capture.fx.refusals import check_ops, in_function, refuse, refuse_op
from weft.capture.fx.retrace import Skeleton, skeleton
from weft.capture.hint import hints_recorded
from weft.capture.numbers.changing import (
    ChangingNumber,
    ChangingNumbers,
    CountedWithTensors,
    plain_number,
)
from weft.capture.numbers.later import forget_numbers
from weft.capture.numbers.spies import spied
from weft.capture.ops.decompositions import decompositions, overwrites
from weft.capture.ops.fallback import fallback, strided
from weft.capture.ops.grids import GridsOfOne
from weft.capture.ops.recurrent import LayersKept
from weft.capture.outputs import OutputSpec, describe_outputs, find_loss
from weft.capture.precision import Casts, loss_seed
from weft.capture.python.caches import Cache, take_caches
from weft.capture.python.changes import depends_on, keeps
from weft.capture.python.hooks import gradient_hooks
from weft.capture.python.labels import labels_ignored
from weft.capture.python.recorder import Counted, PythonRecorder
from weft.capture.python.rewrites import Rewritten
from weft.capture.tracing.before import Writable, restored
from weft.capture.tracing.leftovers import Leftovers
from weft.capture.tracing.lending import attributes_carried, lent, write_replaced
from weft.capture.tracing.same import same_but_for, same_graph
from weft.capture.tree import unflatten
from weft.capture.watch import MISSING, Entry, Watch
from weft.errors import CaptureError, WeftError

LossFunction = Callable[[Any, Any], Any]
# Gives a new step and its inputs.
_Begin: TypeAlias = "Callable[[], tuple[_Step, Any]]"
# Traces a step, given its inputs and whether it is run once more; None where it cannot.
_Run: TypeAlias = "Callable[[_Step, Any, bool], torch.fx.GraphModule | None]"
# What it gives, with the step and its inputs.
_Found: TypeAlias = "tuple[torch.fx.GraphModule, _Step, Any]"


@final
@dataclass(frozen=True)
class ModelTensors:
    """The model's own tensors by name; a tensor with two names stands under the first."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


@final
@dataclass(frozen=True)
class Skeletons:
    """Of the trace of a step, and of that without writes in place, where it is another one."""

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
    watch: Watch
    skeletons: Skeletons
    numbers: Mapping[int, ChangingNumber]


def read_variables(model: torch.nn.Module) -> ModelTensors:
    """The parameters and buffers of `model`."""
    return ModelTensors(dict(model.named_parameters()), dict(model.named_buffers()))


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
    changing: Sequence[Entry] = (),
    left: Leftovers | None = None,
) -> Traced:
    """Trace `loss_fn(model, batch)` and, when `training`, the gradients of its loss.

    The forward runs under `casts`; with "fp16" the gradients start from `weft.loss_seed`.
    Recurrent layers with a parameter in `apart` are taken apart. With the skeletons of a trace for other
    shapes it is quicker, where this one is like that. Numbers in the places `changing` become constants that are
    written before every step, where the step counts with them. Tensors without data that it leaves somewhere are
    noted in `left`.

    Raises:
        CaptureError: naming the user's line, when the step cannot be one graph.
    """
    mode = fake_mode()
    left = left or Leftovers()
    left.begin(mode)
    table = {**fallback(), **decompositions()}

    def begin(numbers: ChangingNumbers | None = None) -> tuple[_Step, Any]:
        cast = casts or Casts(device=device)
        step = _Step(model, loss_fn, variables, batch, training, cast, left, apart, numbers)
        inputs = _fakes(variables, example, mode, device, training)
        return step, inputs

    def alike(step: _Step, inputs: Any, again: bool) -> torch.fx.GraphModule | None:
        return trace_like(None if again or not like else like.step, step, inputs, mode, table)

    def wholly(step: _Step, inputs: Any, again: bool) -> torch.fx.GraphModule | None:
        return _trace(step, inputs, mode, table)

    traced = (_traced(alike, begin) if like else None) or _traced(wholly, begin)
    assert traced is not None  # `_trace` raises
    numbers = ChangingNumbers(changing)
    if numbers.entries:
        traced = _with_numbers(numbers, traced, begin, wholly)
    module, step, inputs = traced
    found = Skeletons(skeleton(module.graph))
    if step.caches:
        take_caches(module, step.caches, left.dependent())
    copies = noted_copies(module.graph)
    locate(module.graph)
    check_ops(module.graph, copies)
    constants = _lift_constants(module, mode)
    flat = [x.detach() for part in inputs for x in part]
    flat += [mode.from_tensor(constant) for constant in constants]
    expected = like.functional if like else None
    plain = functional(module, flat, mode, {**strided(), **overwrites()}, expected)
    if plain is not module:
        found = replace(found, functional=skeleton(plain.graph))
    assert step.outputs is not None  # set by running it
    return Traced(
        plain.graph,
        step.outputs,
        step.output_keys,
        step.gradients,
        constants,
        step.recurrent,
        Watch((*step.watch.settled(constants).entries, *step.outcomes)),
        found,
        {
            i: numbers.tensors[id(each)][1]
            for i, each in enumerate(constants)
            if id(each) in numbers.tensors
        },
    )


def _traced(run: _Run, begin: _Begin) -> _Found | None:
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
        step.left.drop()
        return None
    return module, step, inputs


def _traced_again(
    run: _Run,
    begin: _Begin,
    step: _Step,
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
        except Counted:
            raise
        except Exception as error:
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


@contextmanager
def _running(step: _Step) -> Iterator[None]:
    """While this lasts, the step may be run on fake tensors; inside of `restored`, which puts back what it writes."""
    forget_numbers()
    with (
        hints_recorded(),
        step.recorder.recording(),
        module_paths_noted(step.model),
        labels_ignored(),
        torch.random.fork_rng(devices=[]),
        _compiled_parts_eager(),
        torch.set_grad_enabled(step.training),
    ):
        if not step.training:
            step.model.eval()
        yield
        step.left.numbers()


def _with_numbers(
    numbers: ChangingNumbers,
    plain: _Found,
    begin: Callable[[ChangingNumbers], tuple[_Step, Any]],
    run: _Run,
) -> _Found:
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


def _trace(step: _Step, inputs: Any, mode: FakeMode, table: Decompositions) -> torch.fx.GraphModule:
    try:
        return trace(step, inputs, mode, table)
    except WeftError:
        raise
    except Exception as error:
        raise refuse(error, step.failed_at) from error


def _fakes(
    variables: ModelTensors,
    example: Mapping[str, torch.Tensor],
    mode: FakeMode,
    device: str,
    training: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    return (
        [
            fake_tensor(mode, p, device, training and p.requires_grad)
            for p in variables.parameters.values()
        ],
        [fake_tensor(mode, b, device) for b in variables.buffers.values()],
        [fake_tensor(mode, x, device) for x in example.values()],
    )


@final
class _Step:
    """Called with (parameters, buffers, tensors of the batch); notes how the result is built."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        variables: ModelTensors,
        batch: BatchSpec,
        training: bool,
        casts: Casts,
        left: Leftovers,
        apart: Collection[str] = (),
        numbers: ChangingNumbers | None = None,
    ) -> None:
        self.model = model
        self.numbers = numbers
        self.loss_fn = loss_fn
        self.variables = variables
        self.batch = batch
        self.training = training
        self.hooks = gradient_hooks(variables.parameters)
        self.recorder = PythonRecorder(model, loss_fn)
        self.watch = Watch()
        self.made: list[Entry] = []
        self.caches: tuple[Cache, ...] = ()
        self.casts = casts
        self.left = left
        self.apart = apart
        # Set once the step is to run.
        self.around: Writable | None = None
        self.outputs: OutputSpec | None = None
        self.output_keys: tuple[str, ...] = ()
        self.gradients: tuple[str, ...] = ()
        self.recurrent: frozenset[str] = frozenset()
        self.lines = LinesNoted()
        # File and line of the call whose backward has raised.
        self.failed_at: tuple[str, int] | None = None

    def __call__(self, inputs: Any) -> list[torch.Tensor]:
        parameters, buffers, batch = inputs
        own = {**self.variables.parameters, **self.variables.buffers}
        cast = [self.casts.parameter(parameter) for parameter in parameters]
        stand_ins = dict(zip(map(id, own.values()), [*cast, *buffers], strict=True))
        # A backward may read the model too, as that of a checkpoint does.
        with lent(self.model, stand_ins) as slots:
            with attributes_carried(own, stand_ins), self._around(stand_ins):
                result = self._forward(batch, cast)
                write_replaced(slots)
                loss = self._described(find_loss, result) if self.training else None
                self.outputs, tensors = self._described(describe_outputs, result, loss)
                self.output_keys = tuple(tensors)
                gradients = [] if loss is None else self._gradients(loss, parameters)
            self.watch, self.caches = self.recorder.watch(), tuple(self.recorder.caches())
            self.made = self.recorder.made()
        return [*tensors.values(), *gradients, *(each.now for each in self.caches)]

    def _forward(self, batch: list[torch.Tensor], parameters: list[torch.Tensor]) -> Any:
        """Run the user's function; returns its result."""
        by_name = dict(zip(self.variables.parameters, parameters, strict=True))
        # The last mode sees calls first: frames of the other one would hide the user's.
        layers = LayersKept([by_name[name] for name in self.apart])
        casts = self.casts.around(self.model)
        counting = CountedWithTensors() if self.numbers else nullcontext()
        with GridsOfOne(), Rewritten(), counting, layers, self.lines, checkpoints_noted(), casts:
            result = self.loss_fn(self.model, self._batch(batch))
        self.recurrent = frozenset(name for name, one in by_name.items() if id(one) in layers.seen)
        return result

    def _around(self, stand_ins: Mapping[int, torch.Tensor]) -> AbstractContextManager[None]:
        return nullcontext() if self.around is None else self.around.lent(stand_ins)

    @property
    def outcomes(self) -> Sequence[Entry]:
        """Results of what was done with numbers that change."""
        return self.numbers.outcomes if self.numbers else ()

    def _described(self, describe: Callable[..., Any], *args: Any) -> Any:
        try:
            return describe(*args)
        except CaptureError as error:
            raise in_function(self.loss_fn, error) from None

    def _batch(self, tensors: list[torch.Tensor]) -> Any:
        waiting = iter(tensors)
        leaves = [
            next(waiting) if isinstance(leaf, TensorLeaf) else leaf.value
            for leaf in self.batch.leaves
        ]
        return unflatten(leaves, self.batch.tree)

    def _gradients(self, loss: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        wanted = {
            name: parameter
            for name, parameter in zip(self.variables.parameters, parameters, strict=True)
            if parameter.requires_grad
        }
        for name, parameter in wanted.items():
            for hook in self.hooks[name]:
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        mark_backward(loss)
        with backward_noted():
            seed = loss_seed(loss) if self.casts.scaled else None
            try:
                found = torch.autograd.grad(loss, list(wanted.values()), seed, allow_unused=True)
            except Exception:
                sequence = running_sequence()
                self.failed_at = None if sequence is None else self.lines.line_of(sequence)
                raise
        named = {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}
        self.gradients = tuple(named)
        return list(named.values())


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
        if id(tensor) not in lifted:
            with graph.inserting_after(last[0]) if last else graph.inserting_before():
                last = [graph.placeholder(f"constant{len(lifted)}")]
            last[0].meta["val"] = mode.from_tensor(tensor)
            lifted[id(tensor)] = (tensor, last[0])
        node.replace_all_uses_with(lifted[id(tensor)][1])
        graph.erase_node(node)
    return tuple(tensor for tensor, _ in lifted.values())
