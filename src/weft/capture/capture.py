"""From an ordinary module, loss function and optimizer to the logical graph of the whole step."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from weft.capture.batch import BatchSpec, OutputSpec, describe_batch
from weft.capture.optimizer_groups import Optimizing, optimizers_of
from weft.capture.optimizers.attributes import check_hyperparameters, check_optimizer
from weft.capture.optimizers.optimizer import UpdateRule, groups_of, update_rules, with_states_of
from weft.capture.python.symbolic import SymbolicNumber, number_text
from weft.capture.python.tensor_reads import check_constants
from weft.capture.python.unbacked import all_refused
from weft.capture.python_guards import Guard, PythonGuards
from weft.capture.tracing.convert import Boundary, to_logical
from weft.capture.tracing.leaks import no_leaks
from weft.capture.tracing.replaced_tensors import check_memory
from weft.capture.tracing.step_call import Casts, LossFunction, read_variables
from weft.capture.tracing.trace import Skeletons, trace_step
from weft.errors import CaptureError
from weft.ir import verify
from weft.ir.logical import Input, LogicalGraph, Role

# Tracing swaps tensors in the user's model and notes in torch.fx: one capture at a time in a
# process.
_lock = threading.RLock()


@final
@dataclass(frozen=True)
class Captured:
    """A captured step.

    Attributes:
        graph: the step on whole tensors; no layouts yet.
        batch: the structure that a batch must have, and how to flatten it.
        outputs: how to build what the loss function returned.
        constants: tensors from outside of model and batch, by the key of their input; not copied.
        recurrent: names of the parameters of recurrent layers: the step must be captured
            again if other such parameters are split.
        watch: values of Python that the step depends on.
        skeletons: of its trace.
        rules: how parameters are updated, by name.
        numbers: Python numbers that change between steps, by the key of the 0-dim constant of each.
    """

    graph: LogicalGraph
    batch: BatchSpec
    outputs: OutputSpec
    constants: Mapping[str, torch.Tensor]
    recurrent: frozenset[str] = frozenset()
    watch: PythonGuards = field(default_factory=PythonGuards)
    skeletons: Skeletons | None = None
    rules: Mapping[str, UpdateRule] = field(default_factory=dict)
    numbers: Mapping[str, SymbolicNumber] = field(default_factory=dict)

    @property
    def followed(self) -> list[str]:
        """The user's names of what is computed of `numbers`."""
        return sorted({str(number_text(each)) for each in self.numbers.values()})

    def unflatten_outputs(self, values: Mapping[str, Any]) -> Any:
        """Build the value that the loss function returned from the values of the graph's outputs by key."""
        return self.outputs.unflatten(values)


def capture(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    optimizer: Optimizing,
    example_batch: Any,
    device_type: str = "cpu",
    training: bool = True,
    precision: str | None = None,
    apart: Collection[str] = (),
    parameters: str | None = None,
    masters: bool = False,
    like: Captured | None = None,
    changing: Sequence[Guard] = (),
    constants: dict[str, Any] | None = None,
) -> Captured:
    """Capture the whole step at logical size on tensors without data; model and optimizer stay as they are.

    Args:
        model: any module, also on the meta device.
        loss_fn: `loss_fn(model, batch)`; when training it returns the loss, alone, first of a tuple
            or as the entry "loss" of a dict. In evaluation it may return any nest of tensors.
        optimizer: updates the model's parameters; a list of several, which share no parameter; None
            for a step without updates.
        example_batch: nest of tensors and plain constants; only shapes, dtypes and constants are
            used.
        device_type: where the step will run: "cpu" or "cuda".
        training: False for forward only, with the model in evaluation mode.
        precision: "bf16" or "fp16" for a forward under torch's autocast.
        apart: names of parameters whose recurrent layers are decomposed, because their weights lie
            in pieces; others are kept as one op each.
        parameters: "bf16" or "fp16" for casts of all parameters that the forward reads.
        masters: true if optimizers update float32 copies of narrower parameters.
        like: the same step captured for other batch shapes, which makes capture faster and fixes
            the optimizer's states.
        changing: the places of Python numbers that change between steps.
        constants: gets the leaves of the batch without a tensor, by key; shared by all shapes of a step.

    Raises:
        CaptureError: naming the user's line and the reason, when the step cannot be one graph.
        BatchError: when a leaf of the example batch is neither tensor nor constant.
    """
    _check_device(device_type)
    if torch.is_anomaly_enabled():
        raise CaptureError(
            "torch.autograd.detect_anomaly is on, which reads the values of gradients, but the step is captured "
            "once, before gradients exist; do not use it around weft, and look for a nan with a plain step of the model"
        )
    batch, optimizers = describe_batch(example_batch, constants), optimizers_of(optimizer)
    check_hyperparameters(optimizers)
    for each in optimizers.each:
        check_optimizer(each)
    with _lock, no_leaks() as left:
        variables = read_variables(model)
        groups = groups_of(optimizers, variables.parameters) if training else {}
        with all_refused(), torch.autocast(device_type, enabled=False):
            traced = trace_step(
                model,
                loss_fn,
                variables,
                batch,
                batch.flatten_batch(example_batch),
                device_type,
                training,
                Casts(precision, parameters, device_type),
                apart,
                like.skeletons if like else None,
                changing,
                left,
            )
        check_constants(traced.constants, optimizers)
        used = {name: group for name, group in groups.items() if name in traced.gradients}
        given = (variables.parameters, used, masters, device_type)
        made = update_rules(optimizers, *given) if optimizers else {}
        rules = with_states_of(made, like.rules if like else {})
        inputs: list[tuple[Role, str]] = [
            *(("parameter", name) for name in variables.parameters),
            *(("buffer", name) for name in variables.buffers),
            *(("batch", leaf.key) for leaf in batch.tensors),
            *(("constant", f"constant{i}") for i in range(len(traced.constants))),
        ]
        boundary = Boundary(tuple(inputs), traced.output_keys, traced.gradients, rules)
        graph = verify(to_logical(traced.graph, type(model).__name__, boundary))
        check_memory({**variables.buffers, **variables.parameters}, traced.constants, graph)
        left.check(traced.graph)
    read = {node.key for node in graph.of_kind(Input) if node.role == "constant"}
    return Captured(
        graph,
        batch,
        traced.outputs,
        {f"constant{i}": x for i, x in enumerate(traced.constants) if f"constant{i}" in read},
        traced.recurrent,
        traced.watch,
        traced.skeletons,
        rules,
        {f"constant{i}": each for i, each in traced.numbers.items() if f"constant{i}" in read},
    )


def _check_device(device_type: str) -> None:
    if device_type == "cpu":
        return
    backend = getattr(torch, device_type, None)
    if backend is None or not backend.is_available():
        raise CaptureError(
            f"cannot capture for device type {device_type!r}: this machine's torch has no such device; "
            "expected 'cpu', or a machine with that device"
        )
    # torch 2.13 takes gradients of tensors without data on a device only once there was one with data (pytorch#191293).
    torch.empty(1, device=device_type)
