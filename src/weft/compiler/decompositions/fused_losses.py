"""A fused cross-entropy for split classes: without log-probabilities and without their dense gradient.

Before: a log-softmax of [n, classes], split by classes, that only a negative log-likelihood and the two backwards
read. After: of the log-softmax the logarithms of the rows' sums are left; `weft.class_loss` and
`weft.class_loss_backward` read them and the logits. So the logits are read twice instead of nine times, and one
tensor of their size instead of four. Logits that nothing else reads may be in memory by columns: `weft.class_scores`
makes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import final

from weft.compiler.assignment import Assignment
from weft.compiler.context import Context
from weft.compiler.decompositions.decomposition import DecomposableCall, Placed, replaced
from weft.compiler.decompositions.log_softmax import BACKWARD, FORWARD, LogSoftmax, row_sums
from weft.compiler.graph.rewriting import only_result
from weft.hardware import is_launched
from weft.ir.logical import Call, LogicalGraph, Node, Ref, Value
from weft.ir.plan import LocalCall, LocalProgram
from weft.layout import Broadcast, Layout, Split
from weft.ops.rules.losses import NONE, SUM

_PRODUCT = "aten.mm.default"
_LOSS = "aten.nll_loss_forward.default"
_LOSS_GRADIENT = "aten.nll_loss_backward.default"
_CLASSES = Split(1)


def fuse_class_losses(
    graph: LogicalGraph, assignment: Assignment
) -> tuple[LogicalGraph, Assignment]:
    """The graph with such cross-entropies fused: `weft.class_loss` in place of what reads log-probabilities."""
    numbers = {id(node): number for number, node in enumerate(graph.nodes)}
    values = dict(assignment.values)
    instead: dict[int, tuple[Placed, ...]] = {}
    for node in graph.of_kind(Call):
        if node.op == FORWARD:
            fused = _instead(graph, node, assignment, numbers)
            if fused is not None:
                number = numbers[id(node)]
                site = DecomposableCall(graph, node, assignment.operands[number], values)
                instead[number] = tuple(LogSoftmax(site).statistics())
                instead |= {each: (placed,) if placed else () for each, placed in fused.items()}
    return replaced(graph, assignment, instead, values) if instead else (graph, assignment)


def _over_classes(layout: Layout) -> Layout:
    """The layout of a number for each row, [n, 1], that all ranks of the classes know."""
    sbps = tuple(Broadcast() if one == _CLASSES else one for one in layout.sbp)
    return Layout(layout.placement, sbps)


def _instead(
    graph: LogicalGraph, softmax: Call, assignment: Assignment, numbers: Mapping[int, int]
) -> dict[int, Placed | None] | None:
    """The nodes that take the place of the readers of a log-softmax; None if one of them needs it whole."""
    layout = assignment.operands[numbers[id(softmax)]][0]
    name, scores = only_result(softmax).name, softmax.args[0]
    of_rows = len(graph.values[name].shape) == 2 and softmax.args[1] in (1, -1)
    if not (of_rows and _CLASSES in layout.sbp and isinstance(scores, Ref)):
        return None
    result = graph.values[name]
    rows = Value(row_sums(name), (result.shape[0], 1), result.dtype)
    reads = _Reads(assignment, numbers, {name: layout}, rows.ref)
    found: dict[int, Placed | None] = {}
    for reader in graph.users[name]:
        number = numbers[id(reader)]
        placed = list(reads.replaced(graph, reader, name, scores))
        if not placed:
            return None
        found.update(placed if number not in found else ())
    maker = graph.producers[scores.name]
    if isinstance(maker, Call) and maker.op == _PRODUCT and len(graph.users[scores.name]) == 1:
        number = numbers[id(maker)]
        found[number] = (maker.changed(op="weft.class_scores"), assignment.operands[number])
    return found


@final
@dataclass(frozen=True)
class _Reads:
    """Looks at the readers of one log-softmax; all must read it in the layout that `expected` says."""

    assignment: Assignment
    numbers: Mapping[int, int]
    expected: Mapping[str, Layout]
    row_sums: Ref

    def replaced(
        self, graph: LogicalGraph, reader: Node, name: str, scores: Ref
    ) -> Iterator[tuple[int, Placed | None]]:
        """The nodes that take the place of one reader; nothing if it cannot be replaced."""
        if not isinstance(reader, Call):
            return
        layout = self.expected[name]
        match reader.op, reader.args:
            case str(op), (Ref() as y, Ref() as target, None, int(kind), int(ignored)) if (
                op == _LOSS and y.name == name and kind in (NONE, SUM)
            ):
                args = (scores, self.row_sums, target, kind, ignored, 0)
                operands = (layout, _over_classes(layout), self._read(reader, target.name))
                if self._read(reader, name) == layout:
                    call = reader.changed(op="weft.class_loss", args=args, kwargs=())
                    yield self.numbers[id(reader)], (call, operands)
            case str(op), (_, Ref() as y, *_) if op == _LOSS_GRADIENT and y.name == name:
                (made,) = reader.outputs
                users = graph.users[made.name] if made is not None else ()
                if len(users) == 1:
                    yield from self._gradient(reader, users[0], name, scores)
            case str(op), (Ref() as gradient, Ref() as y, *_) if op == BACKWARD and y.name == name:
                maker = graph.producers[gradient.name]
                if isinstance(maker, Call) and len(graph.users[gradient.name]) == 1:
                    yield from self._gradient(maker, reader, name, scores)

    def _gradient(
        self, loss: Call, softmax: Node, name: str, scores: Ref
    ) -> Iterator[tuple[int, Placed | None]]:
        if not (isinstance(softmax, Call) and (loss.op, softmax.op) == (_LOSS_GRADIENT, BACKWARD)):
            return
        layout = self.expected[name]
        match loss.args, softmax.args:
            case (
                (Ref() as grad, Ref() as y, Ref() as target, None, int(kind), int(ignored), _),
                (Ref() as made, Ref() as again, *_),
            ) if y.name == again.name == name and kind in (NONE, SUM):
                whole = self.assignment.values[made.name]
                reads = (self._read(loss, name), self._read(softmax, name))
                if {whole, self._read(softmax, made.name), *reads} != {layout}:
                    return
                row = _over_classes(layout)
                operands = (self._read(loss, grad.name), layout, row)
                args = (grad, scores, self.row_sums, target, kind, ignored, 0)
                call = softmax.changed(op="weft.class_loss_backward", args=args, kwargs=())
                yield self.numbers[id(loss)], None
                yield (
                    self.numbers[id(softmax)],
                    (call, (*operands, self._read(loss, target.name))),
                )

    def _read(self, node: Call, name: str) -> Layout:
        names = list(dict.fromkeys(arg.name for arg in node.args if isinstance(arg, Ref)))
        return self.assignment.operands[self.numbers[id(node)]][names.index(name)]


# The two backwards of a cross-entropy as one: no dense gradient of the log-probabilities is made.
#
# Before: a local program in which `nll_loss_backward` makes a tensor of the size of the logits, almost
# all zeros, that only the backward of the log-softmax reads. After: `weft.cross_entropy_backward` in
# place of both: two tensors of that size at a time instead of three.


JOINED = "weft.cross_entropy_backward"
# Scores of fewer elements stay in the cache anyway, and each call of a kernel counts.
SMALLEST = 2**18
# In narrower types torch's kernels compute in float32 and round once.
_DTYPES = ("float32", "float64")


def join_losses(program: LocalProgram, context: Context) -> LocalProgram:
    """The program with the backwards of cross-entropies of [n, classes] joined.

    Classes must not be split, nothing else may read the gradient of the log-probabilities. The joined one takes a few
    rows at a time: where calls are launched, those would be too many launches.
    """
    if is_launched(context.placement.device_type) or not context.options.own_kernels:
        return program
    reads = Counter(name for node in program.nodes for name in node.reads)
    reads.update(output.name for output in program.outputs)
    losses: dict[str, tuple[int, LocalCall]] = {}
    # The calls that take the place of nodes, by their numbers; None for a node that nothing replaces.
    joined: dict[int, LocalCall | None] = {}
    for place, node in enumerate(program.nodes):
        match node:
            case LocalCall(op="aten.nll_loss_backward.default", outputs=(made,)) if made:
                if reads[made.name] == 1:
                    losses[made.name] = (place, node)
            case LocalCall(op="aten._log_softmax_backward_data.default", args=(Ref(name), *_)):
                before, loss = losses.get(name, (0, None))
                call = loss and _join(program, loss, node)
                if call:
                    joined |= {before: None, place: call}
    if not joined:
        return program
    nodes = (joined.get(place, node) for place, node in enumerate(program.nodes))
    kept = tuple(node for node in nodes if node is not None)
    left = {value.name for node in kept for value in node.makes}
    gone = {value.name for node in program.nodes for value in node.makes} - left
    origins = {name: origin for name, origin in program.origins.items() if name not in gone}
    return replace(program, nodes=kept, loop=program.loop - gone, origins=origins)


def _join(program: LocalProgram, loss: LocalCall, softmax: LocalCall) -> LocalCall | None:
    match loss.args, softmax.args:
        case (
            (Ref() as grad, Ref() as y, Ref() as target, weight, int(kind), ignored, total),
            (_, Ref() as again, int(dim), _),
        ) if y == again and kind in (NONE, SUM) and loss.phase == softmax.phase:
            (made,), scores = softmax.outputs, program.values[y.name]
            alike = made is not None and made.dtype == scores.dtype
            alike &= prod(scores.shape) >= SMALLEST
            if alike and scores.dtype in _DTYPES and len(scores.shape) == 2 and dim in (1, -1):
                args = (grad, y, target, weight, kind, ignored, total)
                return softmax.changed(op=JOINED, args=args, kwargs=())
    return None
