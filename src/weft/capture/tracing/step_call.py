"""The user's step as one call on tensors: forward, loss and gradients, and what it notes while it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from weft.capture.batch import (
    BatchSpec,
    OutputSpec,
    TensorLeaf,
    describe_outputs,
    find_loss,
    is_dense,
)
from weft.capture.fx.locations import LinesNoted, backward_noted, checkpoints_noted
from weft.capture.fx.private import mark_backward, running_sequence
from weft.capture.fx.refusals import in_function
from weft.capture.ops.recurrent import LayersKept
from weft.capture.python.assertions import is_check
from weft.capture.python.caches import Cache, kept_results
from weft.capture.python.hooks import gradient_hooks
from weft.capture.python.recorder import PythonRecorder
from weft.capture.python.rewrites import Rewritten
from weft.capture.python.symbolic import CountedWithTensors, SymbolicNumbers, is_symbolic
from weft.capture.python.tensor_reads import check_no_backward, gradients_left, reads_noted
from weft.capture.python.unbacked import refuse_value
from weft.capture.python_guards import Guard, PythonGuards
from weft.capture.tracing.leaks import FakeTensorLeaks
from weft.capture.tracing.mutations import MutableState
from weft.capture.tracing.replaced_tensors import (
    attributes_carried,
    check_memory_kept,
    kind_of,
    memory_of,
    tensors_replaced,
    write_replaced,
)
from weft.capture.tree import Static, unflatten
from weft.errors import CaptureError

LossFunction = Callable[[Any, Any], Any]


@final
@dataclass(frozen=True)
class ModelTensors:
    """The model's own tensors by name; a tensor with two names is under the first."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def read_variables(model: torch.nn.Module) -> ModelTensors:
    """The parameters and buffers of `model`.

    Raises:
        CaptureError: naming one that is not a block of numbers.
    """
    found = ModelTensors(dict(model.named_parameters()), dict(model.named_buffers()))
    for kind, tensors in (("parameter", found.parameters), ("buffer", found.buffers)):
        for name, tensor in tensors.items():
            if not is_dense(tensor):
                kept = (
                    tensor.layout if tensor.layout is not torch.strided else "nested or quantized"
                )
                raise CaptureError(
                    f"the {kind} {name} is not a dense tensor ({kept}), which is not supported; expected a dense "
                    "one: tensor.to_dense(), or its indices and values as tensors of their own"
                )
    return found


@final
class StepCall:
    """The step, called with (parameters, buffers, tensors of the batch); what it notes is of the last call.

    Args:
        model: the user's.
        loss_fn: the user's.
        variables: the model's own tensors.
        batch: the structure of the example batch.
        training: true if gradients are wanted.
        casts: of parameters, and autocast.
        left: the tensors without data that calls leave somewhere.
        apart: names of the weights whose recurrent layers are decomposed.
        numbers: that change between steps, in whose places stand-ins are while it runs.

    Attributes:
        hooks: on gradients, by parameter.
        recorder: of what a call reads of Python.
        watch: the values of Python that the step depends on.
        made: numbers that the step made where it had read none.
        caches: tensors that it put into attributes, whose values come after its results.
        around: lends stand-ins to what lies around the model; set before a call.
        outputs: how to build what the loss function returned.
        output_keys: of the tensors in it.
        gradients: names of the parameters that have one.
        recurrent: names of the parameters of recurrent layers.
        lines: of calls.
        failed_at: file and line of the call whose backward has raised.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        variables: ModelTensors,
        batch: BatchSpec,
        training: bool,
        casts: Casts,
        left: FakeTensorLeaks,
        apart: Collection[str] = (),
        numbers: SymbolicNumbers | None = None,
    ) -> None:
        self.model = model
        self.numbers = numbers
        self.loss_fn = loss_fn
        self.variables = variables
        self.batch = batch
        self.training = training
        self.hooks = gradient_hooks(variables.parameters)
        self.recorder = PythonRecorder(model, loss_fn)
        self.watch = PythonGuards()
        self.made: list[Guard] = []
        self.caches: tuple[Cache, ...] = ()
        self.casts = casts
        self.left = left
        self.apart = apart
        self.around: MutableState | None = None
        self.outputs: OutputSpec | None = None
        self.output_keys: tuple[str, ...] = ()
        self.gradients: tuple[str, ...] = ()
        self.recurrent: frozenset[str] = frozenset()
        self.lines = LinesNoted()
        self.failed_at: tuple[str, int] | None = None

    def __call__(self, inputs: Any) -> list[torch.Tensor]:
        parameters, buffers, batch = inputs
        own = {**self.variables.parameters, **self.variables.buffers}
        cast = [self.casts.parameter(parameter) for parameter in parameters]
        stand_ins = dict(zip(map(id, own.values()), [*cast, *buffers], strict=True))
        named = dict(zip(own, stand_ins.values(), strict=True))
        memory = [(memory_of(each), kind_of(each)) for each in named.values()]
        casts = {
            name: x._version
            for name, x, plain in zip(own, cast, parameters, strict=False)
            if x is not plain
        }
        pairs = zip(self.variables.parameters.items(), cast, strict=True)
        names = {id(each): name for (name, own_one), x in pairs for each in (own_one, x)}
        # A backward may read the model too, as that of a checkpoint does.
        with tensors_replaced(self.model, stand_ins) as places:
            with (
                attributes_carried(own, stand_ins),
                nullcontext() if self.around is None else self.around.lent(stand_ins),
                checkpoints_noted(),
                reads_noted(self.values_read, stand_ins, names),
            ):
                result = self._forward(batch, cast)
                self._described(check_no_backward, parameters)
                loss = self._described(find_loss, result) if self.training else None
                self.outputs, tensors = self._described(describe_outputs, result, loss)
                self.output_keys = tuple(tensors)
                gradients = [] if loss is None else self._gradients(loss, parameters)
                check_memory_kept(named, memory, casts)
                results = write_replaced(places, [*tensors.values(), *gradients])
            read = self.recorder.watch().entries
            self.watch = PythonGuards((*read, *kept_results(read), *self.constants()))
            self.caches = tuple(self.recorder.caches())
            self.made = self.recorder.made()
        return [*results, *(each.now for each in self.caches)]

    def _forward(self, batch: list[torch.Tensor], parameters: list[torch.Tensor]) -> Any:
        """The result of the user's function, which runs here."""
        by_name = dict(zip(self.variables.parameters, parameters, strict=True))
        # The last mode sees calls first: frames of the other one would hide the user's.
        layers = LayersKept([by_name[name] for name in self.apart])
        casts = self.casts.around(self.model)
        counting = CountedWithTensors() if self.numbers else nullcontext()
        waiting = iter(batch)
        leaves = [
            next(waiting) if isinstance(leaf, TensorLeaf) else self.batch.constants[leaf.key]
            for leaf in self.batch.leaves
        ]
        with Rewritten(), counting, layers, self.lines, casts:
            result = self.loss_fn(self.model, unflatten(leaves, self.batch.tree))
        self.recurrent = frozenset(name for name, one in by_name.items() if id(one) in layers.seen)
        return result

    def values_read(self, tensor: torch.Tensor, by: str) -> None:
        """Python has read the values of a tensor from outside, or, refused, of the model; a check is in the graph."""
        own = (*self.variables.parameters.values(), *self.variables.buffers.values())
        if any(tensor is each for each in own):
            raise refuse_value(by)
        if not is_check(by):
            self.recorder.values(tensor)

    @property
    def outcomes(self) -> Sequence[Guard]:
        """Results of what was done with numbers that change."""
        return self.numbers.outcomes if self.numbers else ()

    def _described(self, describe: Callable[..., Any], *args: Any) -> Any:
        try:
            return describe(*args)
        except CaptureError as error:
            raise in_function(self.loss_fn, error) from None

    def constants(self) -> Iterator[Guard]:
        """The entries of the batch that are not tensors, but for numbers that are inputs already."""
        space = self.batch.constants
        for leaf in self.batch.leaves:
            if isinstance(leaf, Static) and not is_symbolic(space[leaf.key]):
                yield Guard(space, leaf.key, space[leaf.key], f"the batch's leaf {leaf.key!r}")

    def _gradients(self, loss: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        wanted = {
            name: parameter
            for name, parameter in zip(self.variables.parameters, parameters, strict=True)
            if parameter.requires_grad
        }
        for name, parameter in wanted.items():
            for hook in self.hooks[name]:
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        # Of all leaves, so that whatever user code there is in the backward runs, as it does in `loss.backward()`.
        inputs = [*wanted.values(), *mark_backward(loss)]
        with backward_noted():
            seed = loss_seed(loss) if self.casts.scaled else None
            try:
                found = torch.autograd.grad(loss, inputs, seed, allow_unused=True)
            except Exception:
                sequence = running_sequence()
                self.failed_at = None if sequence is None else self.lines.line_of(sequence)
                raise
        # Those that the backward gives, and those that others inside it have left, as of an `autograd.Function`.
        left = gradients_left(wanted.values())
        totals = [
            own if more is None else more if own is None else own + more
            for own, more in zip(found[: len(left)], left, strict=True)
        ]
        self.gradients = tuple(
            n for n, each in zip(wanted, totals, strict=True) if each is not None
        )
        return [each for each in totals if each is not None]


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True)
class Casts:
    """The dtype of the forward: "bf16", "fp16", or None for the model's own.

    Attributes:
        compute: of matrix products and convolutions, by autocast.
        parameters: of every floating-point parameter, and of what the model is called with.
    """

    compute: str | None = None
    parameters: str | None = None
    device: str = "cpu"

    @property
    def scaled(self) -> bool:
        """True if gradients are so small in the dtype that the loss has to be scaled."""
        return "fp16" in (self.compute, self.parameters)

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that stands for a parameter in the forward."""
        cast: torch.Tensor = _cast(tensor, self.parameters)
        return cast

    @contextmanager
    def around(self, model: torch.nn.Module) -> Iterator[None]:
        """The forward of `model` within the context: under autocast, of arguments that are cast."""

        def cast(_: Any, args: Any, kwargs: Any) -> Any:
            return pytree.tree_map(lambda leaf: _cast(leaf, self.parameters), (args, kwargs))

        hook = None
        if self.parameters is not None:
            hook = model.register_forward_pre_hook(cast, with_kwargs=True)
        try:
            with autocast(self.compute, self.device):
                yield
        finally:
            if hook is not None:
                hook.remove()


def _cast(leaf: Any, to: str | None) -> Any:
    if to is None or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.to(_DTYPES[to])


def autocast(precision: str | None, device_type: str) -> AbstractContextManager[Any]:
    """Within the context, torch casts the operands of matrix products and convolutions down.

    Raises:
        CaptureError: when the precision is unknown.
    """
    if precision is None:
        return nullcontext()
    if precision not in _DTYPES:
        raise CaptureError(f"precision={precision!r} is unknown; expected 'bf16', 'fp16' or None")
    return torch.autocast(device_type, dtype=_DTYPES[precision])


def loss_seed(loss: torch.Tensor) -> torch.Tensor:
    """The gradient of the loss by itself: ones, marked for the pass that puts a loss scale there."""
    seed: torch.Tensor = torch.ops.weft.loss_seed(loss)
    return seed


@torch.library.custom_op("weft::loss_seed", mutates_args=(), schema="(Tensor loss) -> Tensor")
def _loss_seed(loss: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(loss)


@_loss_seed.register_fake
def _(loss: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(loss)
