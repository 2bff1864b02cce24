"""Segments cut into parts that Inductor compiles, and the ATen code between them.

Parts are whole repeated layers (`Compute.parts`), so equal layers share one kernel. Calls that are not plain function
of ATen ops stay as they are: most of weft's own ops, random draws, ops over a step and arguments that vary between
micro-batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.hardware import default_device
from weft.hardware.durations import Durations
from weft.ir.arguments import with_names
from weft.ir.logical import Ref
from weft.ir.nodes import FORWARD
from weft.ir.plan import Compute, LocalCall, LocalValue, RankPlan
from weft.ops.weft_ops import ops_that
from weft.runtime.compiled.choice import Code, KernelChoice, KernelInput, Kernels, choose
from weft.runtime.compiled.inductor import Boxed
from weft.runtime.kernels.generated import (
    CutCalls,
    build_kernel,
    differs,
    is_local,
    may_alias,
)
from weft.runtime.recording import note_made
from weft.runtime.torch_ops import torch_op


@final
@dataclass(frozen=True, slots=True)
class Form:
    """A part in canonical names: equal parts have equal forms.

    Attributes:
        calls: with inputs named `i0, i1, …` and results `v0, v1, …`, in the order of appearance.
    """

    calls: tuple[LocalCall, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A run of calls in the names of its program: `inputs` and `outputs` are in the order of the form's."""

    form: Form
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def part_of(calls: Sequence[LocalCall], needed: Collection[str]) -> Part:
    """A run of calls as a part."""
    names: dict[str, str] = {}
    inputs: list[str] = []
    made: dict[str, None] = {}
    written = []
    for call in calls:
        for name in call.uses:
            if name not in names:
                names[name] = f"i{len(inputs)}"
                inputs.append(name)
        for value in call.makes:
            names[value.name] = f"v{len(made)}"
            made[value.name] = None
        outputs = tuple([each and replace(each, name=names[each.name]) for each in call.outputs])
        written.append(replace(with_names(call, names), outputs=outputs, phase=FORWARD))
    read = tuple(name for name in made if name in needed)
    named = tuple(names[name] for name in inputs), tuple(names[name] for name in read)
    return Part(Form(tuple(written), *named), tuple(inputs), read)


# A kernel of fewer calls gains nothing.
FEWEST_CALLS = 3
# The part of a step's seconds that a part must take to be worth a second of compiling and more.
LEAST = 1e-3

PLAIN = ops_that("plain")


@final
class PartKernel:
    """A part as a kernel: takes its inputs as a list, which it empties.

    Args:
        code: the same as ATen code; runs when the inputs are not laid out as `code.inputs` says.
    """

    def __init__(self, compiled: Boxed, code: Code) -> None:
        self._compiled = compiled
        self._code = code
        self._checked = False

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        if self._checked:
            return self._compiled(inputs)
        # Look at the strides of the inputs: they are the same in every step.
        pairs = zip(self._code.inputs, inputs, strict=True)
        if not all(spec.fits(tensor) for spec, tensor in pairs):
            self._compiled = self._as_code
        self._checked = True
        outputs = self._compiled(inputs)
        note_made(outputs)
        return outputs

    def _as_code(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        tensors = tuple(inputs)
        inputs.clear()
        return self._code.function(*tensors)


@final
@dataclass(eq=False)
class Distinct:
    """A distinct part of a rank's segments, and how often it occurs."""

    calls: int
    outputs: tuple[KernelInput, ...]
    choice: KernelChoice
    code: Code
    times: int = 0


@final
@dataclass(eq=False)
class PartCutter:
    """Cuts the segments of one rank, in the order of the plan; `lasting` are the tensors of variables and constants."""

    plan: RankPlan
    device: torch.device
    lasting: Mapping[str, Tensor]
    kernels: Kernels
    distinct: dict[tuple[str, tuple[KernelInput, ...]], Distinct] = field(default_factory=dict)

    def __post_init__(self) -> None:
        segments = [actor for actor in self.plan.actors if isinstance(actor, Compute)]
        self._specs = {name: KernelInput.of(tensor) for name, tensor in self.lasting.items()}
        self._values = {one.value.name: one.value for one in self.plan.inputs}
        self._values.update((one.value.name, one.value) for one in self.plan.registers)
        self._least = LEAST * self._act_seconds(segments)

    def _act_seconds(self, segments: Sequence[Compute]) -> float:
        """Seconds of a step, as estimated; of one micro-batch where there are several."""
        made = {value.name: value for one in segments for node in one.nodes for value in node.makes}
        durations = Durations(default_device(self.device.type), ())
        values = {**self._values, **made}
        return sum(durations.node(node, values) for one in segments for node in one.nodes)

    def cut(self, segment: Compute, outputs: Collection[str]) -> CutCalls:
        """The calls of one segment with its parts in place of what they hold."""
        calls = [node for node in segment.nodes if isinstance(node, LocalCall)]
        nodes: list[LocalCall] = []
        functions: dict[str, Callable[..., Any]] = {}
        reads = Counter(name for call in calls for name in set(call.uses))
        reads.update(set(outputs))
        for run in _runs(segment, calls):
            if not _plain(run[0]):
                self._skip(run)
                nodes += run
                continue
            inside = Counter(name for call in run for name in set(call.uses))
            part = part_of(run, {name for name in reads if reads[name] > inside[name]})
            kernel = self._kernel(part)
            if kernel is None:
                nodes += run
                continue
            op = f"part.{len(functions)}"
            functions[op] = kernel
            nodes.append(_call(op, part, run))
        return CutCalls(tuple(nodes), functions)

    def _kernel(self, part: Part) -> PartKernel | None:
        inputs = tuple(self._spec(name) for name in part.inputs)
        kernel = build_kernel(part.form.calls, part.form.outputs, self.device)
        key = (kernel.source, inputs)
        if key not in self.distinct:

            def bare(*tensors: Tensor) -> Sequence[Tensor]:
                return kernel.function(None, *tensors)

            code = Code(kernel.source, bare, inputs)
            with FakeTensorMode(), torch.no_grad():
                outputs = tuple(map(KernelInput.of, bare(*[spec.empty() for spec in inputs])))
            small = len(part.form.calls) < FEWEST_CALLS or not inputs or not outputs
            choice = KernelChoice(None) if small else choose(code, self.kernels, self._least)
            self.distinct[key] = Distinct(len(part.form.calls), outputs, choice, code)
        found = self.distinct[key]
        found.times += 1
        self._specs.update(zip(part.outputs, found.outputs, strict=True))
        compiled = found.choice.compiled
        return None if compiled is None else PartKernel(compiled, found.code)

    def _skip(self, run: Sequence[LocalCall]) -> None:
        """Note how the results of calls are laid out that are no part."""
        for call in run:
            for value in call.makes:
                self._values[value.name] = value
                of = next(iter(call.uses), None)
                if of is not None and may_alias(call.op) and self._spec(of).shape == value.shape:
                    self._specs[value.name] = self._spec(of)

    def _spec(self, name: str) -> KernelInput:
        """The spec of a value; contiguous when nothing else is known, as of values that are fed or communicated."""
        if name not in self._specs:
            value = self._values[name]
            dtype = getattr(torch, value.dtype)
            self._specs[name] = KernelInput(
                value.shape,
                tuple(math.prod(value.shape[place + 1 :]) for place in range(len(value.shape))),
                dtype,
                self.device,
            )
        return self._specs[name]


def _runs(segment: Compute, calls: Sequence[LocalCall]) -> list[list[LocalCall]]:
    """Stretches of the calls of a segment between its cuts that are all plain, or not."""
    begins = set(segment.parts)
    begun = accumulate(place in begins for place in range(len(segment.nodes)))
    # Calls are known by identity: equal ones are in many places.
    numbers = {id(node): number for node, number in zip(segment.nodes, begun, strict=True)}
    keyed = [((numbers[id(call)], _plain(call)), call) for call in calls]
    return [[call for _, call in group] for _, group in groupby(keyed, lambda pair: pair[0])]


def _plain(call: LocalCall) -> bool:
    """True if Inductor may compile a call: a function of ATen ops, the same in each micro-batch.

    No such call draws random numbers: capture leaves that to `weft.uniform`.
    """
    is_complex = any(value.dtype.startswith("complex") for value in call.makes)
    if differs(call) or is_complex:
        return False
    aten = not is_local(call.op) and call.op.startswith("aten.")
    return call.op in PLAIN or (aten and not torch_op(call.op)._schema.is_mutable)


def _call(op: str, part: Part, run: Sequence[LocalCall]) -> LocalCall:
    made: dict[str, LocalValue] = {value.name: value for call in run for value in call.makes}
    specs = {
        name: spec
        for call in run
        for name, spec in zip(call.operands, call.call.operands, strict=True)
    }
    inputs = tuple([Ref(name, specs[name]) for name in part.inputs])
    outputs = tuple([made[name] for name in part.outputs])
    return LocalCall.of(op, (inputs,), outputs, run[0].phase)
