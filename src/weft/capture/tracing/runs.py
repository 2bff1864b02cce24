"""Runs of a step under a trace: once, once more where it changes values of Python, and with numbers as tensors.

Two traces are compared as graphs: ops, operands, numbers, and the values of constants. The second one may read what the
first one has kept, such as a table of positions, in place of making it: then what makes it in the first is compared.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import torch

from weft.capture.fx.generators import generators_followed
from weft.capture.fx.locations import hints_recorded, module_paths_noted
from weft.capture.fx.private import is_fake, root_of, written_in
from weft.capture.python.caches import depending, draws
from weft.capture.python.rewrites import functions_replaced
from weft.capture.python.side_effects import depends_on, may_hold_state, randomness_refused
from weft.capture.python.symbolic import SymbolicNumbers, counting_on, plain_number
from weft.capture.python.unbacked import forget_numbers, forget_refused
from weft.capture.python_guards import MISSING, Guard
from weft.capture.tracing.mutations import mutations_undone
from weft.capture.tracing.step_call import StepCall

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
# Gives the node of the first graph that made a tensor which the second one reads.
Maker: TypeAlias = Callable[[torch.Tensor], "torch.fx.Node | None"]
# Gives a new step and its inputs.
Begin: TypeAlias = "Callable[[], tuple[StepCall, Any]]"
# Traces a step, given its inputs and whether it is run once more; None if it cannot.
Run: TypeAlias = "Callable[[StepCall, Any, bool], torch.fx.GraphModule | None]"
# The result, with the step and its inputs.
Found: TypeAlias = "tuple[torch.fx.GraphModule, StepCall, Any]"


def trace_run(run: Run, begin: Begin) -> Found | None:
    """The trace of a step, with the step and its inputs; None if `run` finds none. The writes of the step are
    undone.

    A step that has changed a value of Python which it could have read, or has kept a tensor outside of the model, is
    traced once more, from there: only where that gives the same graph, every step is the one that was captured.

    Raises:
        CaptureError: naming what the step changes or keeps, where that makes another step of it.
    """
    step, inputs = begin()
    with mutations_undone(step.model, step.loss_fn) as before:
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
    changes: list[Guard],
    kept: Mapping[int, str],
) -> torch.fx.GraphModule | None:
    """`module`, where the step gives it once more from what it has left; None if `run` finds nothing then.

    Numbers of the `changes` are counted on, and may not be read; of what the step has kept it may read what is made
    of constants and shapes, which each step makes again.
    """
    changed = [*changes, *(replace(each, value=MISSING) for each in step.made)]
    refused = depends_on(changed) if changed else may_hold_state(next(iter(kept.values())))
    numbers = counting_on(changes)
    with numbers.placed():
        again, inputs = begin()
        again.around = step.around
        try:
            with _running(again):
                other = run(again, inputs, True)
        except Exception as error:
            if again.recorder.counted:
                raise
            raise refused from error
    if numbers.outcomes:
        raise refused
    if other is None:
        return None
    step.left.read(other, kept)
    results = len(step.output_keys) + len(step.gradients)
    same = same_graph(module, other, step.left.maker, results)
    if not same or again.outputs != step.outputs:
        raise refused
    return module


def with_numbers(
    numbers: SymbolicNumbers,
    plain: Found,
    begin: Callable[[SymbolicNumbers], tuple[StepCall, Any]],
    run: Run,
) -> Found:
    """The trace of a step that takes some numbers from tensors, where it is like `plain`; else that."""
    module, before, _ = plain
    with mutations_undone(before.model, before.loss_fn) as around, numbers.placed():
        step, inputs = begin(numbers)
        step.around = around
        try:
            with _running(step):
                other = run(step, inputs, True)
        except Exception:  # something takes numbers only
            return plain
    now = {key: plain_number(number) for key, (_, number) in numbers.tensors.items()}
    if other is None or not same_graph(module, other, numbers=now):
        return plain
    step.left.traced(other)
    return other, step, inputs


@contextmanager
def _running(step: StepCall) -> Iterator[None]:
    """Within the context, the step may run on fake tensors; inside of `mutations_undone`, which undoes its writes."""
    forget_numbers()
    if not step.training:
        # Before reading is noted: a model may look at the mode that it is in.
        step.model.eval()
    with (
        hints_recorded(),
        randomness_refused(),
        step.recorder.reading(),
        module_paths_noted(step.model),
        functions_replaced(),
        generators_followed(),
        _compiled_parts_eager(),
        torch.set_grad_enabled(step.training),
    ):
        yield
        step.left.numbers()


@contextmanager
def _compiled_parts_eager() -> Iterator[None]:
    """Within the context, what the user compiled with `torch.compile` runs as it was written."""
    dynamo = sys.modules.get("torch._dynamo.config")
    if dynamo is None:  # nothing was; it takes seconds to import
        yield
        return
    allowed = dynamo.patch(error_on_nested_fx_trace=False)
    with allowed, torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # It means `module_paths_noted`, which the wrapper's own call does not disturb.
        warnings.filterwarnings("ignore", "Using `torch.compile")
        yield


def same_graph(
    one: torch.fx.GraphModule,
    other: torch.fx.GraphModule,
    maker: Maker | None = None,
    results: int | None = None,
    numbers: Mapping[int, Any] | None = None,
) -> bool:
    """True if two traces of the same step compute the same results from the same inputs.

    Args:
        one, other: the traces.
        maker: of what `one` has kept.
        results: how many of the outputs count.
        numbers: for which tensors are in `other`, by the identities of these.
    """
    first = _Values(one).filled()
    second = _Values(other, first, maker, numbers or {}).filled()
    return (first.effects, first.outputs(results)) == (second.effects, second.outputs(results))


@final
@dataclass
class _Values:
    """The values of a graph, each with a number; what is computed alike has the same number.

    Attributes:
        module: of the graph.
        before: the graph with which it is compared.
        maker: of what that one has kept.
        given: numbers for which tensors stand, by the identities of these.
        numbers: of the nodes; of those that read a given one, that itself.
        states: of the nodes that were written in place, or look at such a one: a number for all these writes.
        effects: writes, random numbers and checks, in order.
    """

    module: torch.fx.GraphModule
    before: _Values | None = None
    maker: Maker | None = None
    given: Mapping[int, Any] = field(default_factory=dict)
    numbers: dict[torch.fx.Node, Any] = field(default_factory=dict)
    states: dict[torch.fx.Node, int] = field(default_factory=dict)
    effects: list[int] = field(default_factory=list)
    plain: set[torch.fx.Node] = field(default_factory=set)
    constants: list[Any] = field(default_factory=list)
    table: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.before is not None:
            self.table, self.constants = self.before.table, self.before.constants

    def filled(self) -> _Values:
        """With the numbers of all nodes."""
        graph = self.module.graph
        dependent = depending(graph, graph.find_nodes(op="placeholder"))
        for place, node in enumerate(graph.nodes):
            if node.op == "placeholder":
                self.numbers[node] = self._number(("input", place))
            elif node.op == "get_attr":
                self._read(node)
            elif node.op != "output":
                self._computed(node, node in dependent)
        return self

    def outputs(self, results: int | None) -> str:
        """The first so many outputs, in words."""
        output = next(iter(reversed(self.module.graph.nodes)))
        return self._words(output.args[0][:results])

    def _number(self, key: Any) -> int:
        return self.table.setdefault(key, len(self.table))

    def _words(self, operands: Any) -> str:
        """Operands with numbers for nodes, and for what was written to them."""

        def word(node: torch.fx.Node) -> Any:
            if node in self.plain:
                return self.numbers[node]
            return f"%{self.numbers[node]}.{self.states.get(root_of(node), '')}"

        return repr(torch.fx.map_arg(operands, word))

    def _read(self, node: torch.fx.Node) -> None:
        """A tensor of elsewhere, or what the graph before has kept."""
        value = getattr(self.module, node.target)  # type: ignore[arg-type]
        if id(value) in self.given:
            self.plain.add(node)
            self.numbers[node] = self.given[id(value)]
            return
        made = self.maker(value) if self.before and self.maker and is_fake(value) else None
        if self.before is not None and made is not None:
            self.numbers[node] = self.before.numbers[made]
            if root_of(made) in self.before.states:
                self.states[node] = self.before.states[root_of(made)]
            return
        same = (at for at, each in enumerate(self.constants) if _same_constant(each, value))
        at = next(same, len(self.constants))
        if at == len(self.constants):
            self.constants.append(value)
        self.numbers[node] = self._number(("constant", at))

    def _computed(self, node: torch.fx.Node, dependent: bool) -> None:
        if _is_same(node):
            self.numbers[node] = self.numbers[node.args[0]]  # type: ignore[index]
            return
        # A number and a tensor are operands of other overloads.
        target = getattr(node.target, "overloadpacket", node.target)
        key: tuple[Any, ...] = (node.op, target, self._words((node.args, node.kwargs)))
        written = written_in(node)
        op = isinstance(node.target, torch._ops.OpOverload)
        check = op and not node.target._schema.returns  # type: ignore[union-attr]
        if draws(node) or (dependent and written) or check:
            key = (*key, len(self.effects))
            self.effects.append(self._number(key))
        self.numbers[node] = self._number(key)
        for root in written:
            self.states[root] = self._number((self.states.get(root), key))


def _is_same(node: torch.fx.Node) -> bool:
    """True if a node gives its operand: also a view of all of it."""
    if node.target in _SAME:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    views = any(result.alias_info for result in node.target._schema.returns)
    if not views or not node.args or not isinstance(node.args[0], torch.fx.Node):
        return False
    both = node.meta.get("val"), node.args[0].meta.get("val")
    one, other = (_form(x) if isinstance(x, torch.Tensor) else None for x in both)
    return one is not None and one == other


def _form(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _same_constant(one: Any, other: Any) -> bool:
    """True if constants are the same tensor, or have the same values; parts of a graph, the same ops."""
    if one is other:
        return True
    if isinstance(one, torch.fx.GraphModule) and isinstance(other, torch.fx.GraphModule):
        return same_graph(one, other)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if is_fake(one) or is_fake(other) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other)
