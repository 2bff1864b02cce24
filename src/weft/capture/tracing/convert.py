"""From a functional fx graph to a `LogicalGraph`: names, roles, argument trees; what computes nothing is dropped."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from weft.capture.fx.locations import autograd_of, in_backward, location_of
from weft.capture.fx.refusals import READS, refuse_op
from weft.capture.optimizers.optimizer import UpdateRule
from weft.errors import CaptureError
from weft.ir.logical import (
    ROLES,
    Call,
    Hint,
    Input,
    LogicalGraph,
    Node,
    Output,
    Phase,
    Ref,
    Role,
    Update,
    Value,
)
from weft.ir.nodes import HINT, MASTER
from weft.layout import parse_sbp
from weft.ops.call import Token
from weft.ops.cost import dtype_name

aten = torch.ops.aten

# Ops whose result is their first argument, in a graph without writes in place.
_SAME = frozenset(
    (aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)
)
# Ops whose result is their first argument when shape, dtype, strides and device stay as they are.
_SAME_IF_UNCHANGED = frozenset(
    (
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.contiguous.default,
    )
)
# Checks of what is known when capturing.
_CHECKS = frozenset(("_assert_tensor_metadata", "_assert_scalar"))
_TRAINED = (
    "the step writes the parameter {!r} in place, which the optimizer updates in the same step; expected only buffers "
    "and parameters that are not trained to be written. Write it between steps: with torch.no_grad(), before the first "
    "one and after each program.step(), or in optimizer.register_step_post_hook(); so for max_norm= of an embedding, "
    "on the whole weight: weight.copy_(weight.renorm(2, 0, max_norm))"
)
_REQUIRE = (aten._assert_async.default, aten._assert_async.msg)


@final
@dataclass(frozen=True)
class Boundary:
    """The inputs and outputs at the borders of the fx graph.

    Attributes:
        inputs: role and key of every placeholder, in order.
        outputs: keys of the first outputs, which the user gets back.
        gradients: names of the parameters whose gradients are the remaining outputs.
    """

    inputs: tuple[tuple[Role, str], ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    rules: Mapping[str, UpdateRule]


def to_logical(graph: torch.fx.Graph, name: str, boundary: Boundary) -> LogicalGraph:
    """The logical graph of a functional fx graph.

    Raises:
        CaptureError: when the step writes something that it must not.
    """
    reader = _Reader(boundary)
    for node in graph.nodes:
        reader.read(node)
    states = [
        Input(
            Value(reader.names.new(f"{parameter}.{state.name}"), state.shape, state.dtype),
            "state",
            f"{parameter}.{state.name}",
        )
        for parameter in boundary.gradients
        if parameter in boundary.rules
        for state in boundary.rules[parameter].states
    ]
    inputs = [*reader.inputs, *states]
    updates = [*reader.copies(), *_updates(boundary, inputs, reader.results)]
    reader.calls += _for_main_parameters(updates, inputs, reader)
    outputs = [Output(ref, key) for key, ref in zip(boundary.outputs, reader.results, strict=False)]
    calls = _needed(reader.calls, [*updates, *outputs])
    readers: list[Node] = [*calls, *updates, *outputs]
    used = {use for node in readers for use in node.uses}
    kept = [x for x in inputs if x.role != "constant" or x.value.name in used]
    kept.sort(key=lambda x: ROLES.index(x.role))
    return LogicalGraph(name, (*kept, *_with_op_numbers(calls), *updates, *outputs))


@final
class _Names:
    def __init__(self) -> None:
        self._taken: set[str] = set()

    def new(self, wish: str) -> str:
        base = re.sub(r"[^A-Za-z0-9_.]+", "_", wish).strip("_") or "value"
        name, count = base, 0
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name


@final
class _Reader:
    """Reads fx nodes in order and keeps what stands for each of them."""

    def __init__(self, boundary: Boundary) -> None:
        self.names = _Names()
        self.inputs: list[Input] = []
        self.calls: list[Call] = []
        self.results: tuple[Ref, ...] = ()
        self._waiting = iter(boundary.inputs)
        self._gradients, self._rules = frozenset(boundary.gradients), boundary.rules
        self._refs: dict[torch.fx.Node, Any] = {}
        self._written: dict[torch.fx.Node, Ref] = {}
        self._inputs_of: dict[torch.fx.Node, Input] = {}
        self._required: list[torch.fx.Node] = []

    def read(self, node: torch.fx.Node) -> None:
        if node.op == "placeholder":
            role, key = next(self._waiting)
            found = Input(_value(self.names.new(key), node.meta["val"]), role, key)
            self.inputs.append(found)
            self._inputs_of[node] = found
            self._refs[node] = found.value.ref
        elif node.op == "output":
            self.results = tuple(self._refs[result] for result in node.args[0])  # type: ignore[index, union-attr]
            self._require(node.args[0][0] if node.args[0] else None)  # type: ignore[index]
        elif node.target is operator.getitem:
            source, index = node.args
            self._refs[node] = self._refs[source][index]  # type: ignore[index]
        elif node.target is aten.copy_.default:
            self._written[node.args[0]] = self._refs[node.args[1]]  # type: ignore[index]
            self._refs[node] = self._refs[node.args[1]]  # type: ignore[index]
        elif (same := _same_as(node)) is not None:
            self._refs[node] = self._refs[same]
        elif str(node.target) in _COMPUTED and isinstance(node.args[0], complex):
            self._refs[node] = node.args[0].conjugate()
        elif node.target is aten._linalg_check_errors.default:
            self._read_linalg_check(node)
        elif node.target in _REQUIRE:
            self._required.append(node)
        elif node.target.overloadpacket.__name__ not in _CHECKS:  # type: ignore[union-attr]
            self._read_call(node)

    def copies(self) -> list[Update]:
        """The new versions of buffers that the step writes."""
        updates = []
        for node, source in self._written.items():
            target = self._inputs_of[node]
            # Parameters that no optimizer updates in this step, such as those of a teacher, are written as buffers are.
            trained = target.key in self._gradients and target.key in self._rules
            if target.role == "buffer" or (target.role == "parameter" and not trained):
                updates.append(Update("copy", target.value.ref, source))
            elif target.role == "parameter":
                raise CaptureError(_TRAINED.format(target.key))
            elif target.role != "batch":  # a batch is not read again
                raise CaptureError(
                    f"the step writes the {target.role} {target.key!r} in place; expected only buffers to be "
                    "written: register the tensor with register_buffer, or compute a new one"
                )
        return updates

    def _read_call(self, node: torch.fx.Node) -> None:
        if node.target._schema.is_mutable:  # type: ignore[union-attr]
            reason = "writes in place; expected ops that make new tensors"
            raise refuse_op(node.target, location_of(node), reason)
        name = str(node.target)
        own = node.target.namespace == "weft"  # type: ignore[union-attr]
        call = Call.of(
            name.removesuffix(".default") if own else _COMPUTED.get(name, name),
            tuple(map(self._arg, node.args)),
            self._outputs(node),
            kwargs=tuple(
                (name, self._arg(arg))
                for name, arg in node.kwargs.items()
                if arg is not None and name != "pin_memory"
            ),
            location=location_of(node),
            phase=Phase(0, "backward" if in_backward(node) else "forward"),
            autograd=autograd_of(node),
        )
        if call.op == HINT:  # of the user's, whose SBPs come as text (`weft.capture.fx.locations`)
            source, text = call.args
            hint = Hint(tuple(map(parse_sbp, str(text).split(","))))
            call = call.changed(args=(source,), hint=hint)
        self.calls.append(call)
        refs = tuple(value and value.ref for value in call.outputs)
        self._refs[node] = refs if isinstance(node.meta["val"], tuple | list) else refs[0]

    def _read_linalg_check(self, node: torch.fx.Node) -> None:
        """The check that follows a factorization: what was computed goes through it, to be raised on the ranks."""
        info: Any = node.args[0]
        if info.target is not operator.getitem:
            reason = "checks error codes that no factorization of the step made"
            raise refuse_op(node.target, location_of(node), reason)
        source = info.args[0]
        before, *others = self._refs[source]
        value = _value(self.names.new(f"{before.name}.checked"), source.meta["val"][0])
        name, matrix = self._arg(node.args[1]), self._arg(node.kwargs.get("is_matrix", False))
        arguments = (before, self._refs[info], name, matrix)
        phase = Phase(0, "backward" if in_backward(node) else "forward")
        location = location_of(node)
        self.calls.append(
            Call.of("weft.checked", arguments, (value,), location=location, phase=phase)
        )
        self._refs[source] = (value.ref, *others)
        for user in source.users:
            if user in self._refs and user.target is operator.getitem and user.args[1] == 0:
                self._refs[user] = value.ref

    def _require(self, output: Any) -> None:
        """Ask for conditions of the step by its first output, which the caller gets: the loss in training."""
        for node in self._required if output is not None else ():
            condition, *message = node.args
            place, first = location_of(node), self.results[0]
            text = f"{place.file}:{place.line}: " if place else ""
            text += f"the step fails a check: {message[0] if message else 'torch._assert_async'}"
            value = _value(self.names.new(f"{first.name}.required"), output.meta["val"])
            phase = Phase(0, "backward" if in_backward(node) else "forward")
            arguments = (first, self._refs[condition], text)  # type: ignore[index]
            self.calls.append(
                Call.of("weft.required", arguments, (value,), location=place, phase=phase)
            )
            self.results = (value.ref, *self.results[1:])

    def _outputs(self, node: torch.fx.Node) -> tuple[Value | None, ...]:
        made = node.meta.get("val")
        parts = made if isinstance(made, tuple | list) else (made,)
        if not all(part is None or _is_dense(part) for part in parts) or made is None:
            reason = "makes no dense tensor; expected ops from dense tensors to dense tensors"
            if any(isinstance(part, torch.Tensor) and not _is_dense(part) for part in parts):
                reason = (
                    "makes a sparse tensor, and sparse tensors are not supported; expected dense "
                )
                reason += "ones: nn.Embedding and nn.EmbeddingBag without sparse=True, x.to_dense() of others"
            if torch.Tag.data_dependent_output in getattr(node.target, "tags", ()):
                reason = READS  # the program caught the refusal of the trace
            raise refuse_op(node.target, location_of(node), reason)
        if isinstance(made, torch.Tensor):
            return (_value(self.names.new(node.name), made),)
        # The gradients that a fused backward makes; BatchNorm's shape function makes all, whatever its mask says.
        named = zip(node.target._schema.arguments, node.args, strict=False)  # type: ignore[union-attr]
        mask: Any = next((value for one, value in named if one.name == "output_mask"), ())
        mask = mask or (True,) * len(made)
        return tuple(
            _value(self.names.new(f"{node.name}.{index}"), part)
            if isinstance(part, torch.Tensor) and wanted
            else None
            for index, (part, wanted) in enumerate(zip(made, mask, strict=True))
        )

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self._refs[arg]
        if isinstance(arg, list | tuple):
            return tuple(map(self._arg, arg))
        if isinstance(arg, torch.device):
            return Token("device", arg.type)
        for kind, of_kind in _TOKENS.items():
            if isinstance(arg, of_kind):
                return Token(kind, str(arg).removeprefix("torch."))
        return arg


_TOKENS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def _is_dense(result: Any) -> bool:
    return not isinstance(result, torch.Tensor) or result.layout == torch.strided


def _value(name: str, tensor: torch.Tensor) -> Value:
    return Value(name, tuple(map(int, tensor.shape)), dtype_name(tensor.dtype))


# Views whose elements are computed when they are read. The data on a rank is read by its memory, by
# communication and by views of other dtypes.
_COMPUTED = {
    "aten._conj.default": "aten._conj_physical.default",
    "aten._neg_view.default": "aten.neg.default",
}


def _same_as(node: torch.fx.Node) -> Any:
    """The node whose value this one has too, if any."""
    source: Any = node.args[0] if node.args else None
    unchanged = node.target in _SAME_IF_UNCHANGED and _looks(node) == _looks(source)
    if unchanged or node.target in _SAME:
        return source
    # A transpose may undo the one that made its operand.
    dims = _swapped(node)
    twice = isinstance(source, torch.fx.Node) and dims is not None and dims == _swapped(source)
    return source.args[0] if twice else None


def _swapped(node: torch.fx.Node) -> set[int] | None:
    if node.target is aten.t.default:
        return {0, 1}
    if node.target is not aten.transpose.int:
        return None
    rank = node.meta["val"].dim()
    dims: Any = node.args[1:]
    return {dim % max(rank, 1) for dim in dims}


def _looks(node: Any) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.shape, value.dtype, value.stride(), value.device


def _updates(boundary: Boundary, inputs: Sequence[Input], results: Sequence[Ref]) -> list[Update]:
    names = {(x.role, x.key): x.value.name for x in inputs}
    gradients = dict(zip(boundary.gradients, results[len(boundary.outputs) :], strict=True))
    updates = []
    for parameter, rule in boundary.rules.items():
        if parameter not in gradients:
            continue
        states = [Ref(names["state", f"{parameter}.{state.name}"]) for state in rule.states]
        target = Ref(names["parameter", parameter])
        updates.append(
            Update(
                rule.optimizer,
                target,
                gradients[parameter],
                tuple(states),
                rule.group,
                rule.elementwise,
                takes=rule.takes,
            )
        )
    return updates


def _for_main_parameters(
    updates: list[Update], inputs: Sequence[Input], reader: _Reader
) -> Iterator[Call]:
    """Casts of gradients to the dtype of the FP32 main parameters that they update, which `updates` then read."""
    masters = {x.value.name: x.value for x in inputs if x.key.endswith(f".{MASTER}")}
    for place, update in enumerate(updates):
        for master in (masters[ref.name] for ref in update.states if ref.name in masters):
            made = replace(master, name=reader.names.new(f"{update.source.name}.wide"))
            dtype = (("dtype", Token("dtype", master.dtype)),)
            phase = Phase(0, "backward")
            yield Call.of(
                "aten._to_copy.default", (update.source,), (made,), kwargs=dtype, phase=phase
            )
            updates[place] = replace(update, source=made.ref)


def _needed(calls: Sequence[Call], roots: Sequence[Node]) -> list[Call]:
    used = {name for node in roots for name in node.uses}
    kept = []
    for call in reversed(calls):
        if any(value is not None and value.name in used for value in call.outputs):
            used.update(call.uses)
            kept.append(call)
    return kept[::-1]


def _with_op_numbers(calls: Sequence[Call]) -> list[Call]:
    """The calls with random ops numbered, so that each draws numbers of its own, and pairs of forward and backward.

    Autograd's own numbers advance through all that a process does, and differ between ranks; these count from 0.
    """
    forward, backward = (
        {call.autograd for call in calls if call.phase.kind == kind}
        for kind in ("forward", "backward")
    )
    both = (forward & backward) - {None}
    pairs: dict[int | None, int] = {}
    found, draws = [], 0
    for call in calls:
        if call.autograd in both:
            pairs.setdefault(call.autograd, len(pairs))
        if call.op == "weft.uniform":
            call = call.changed(args=(*call.args[:3], draws))
            draws += 1
        found.append(call.changed(autograd=pairs.get(call.autograd)))
    return found
