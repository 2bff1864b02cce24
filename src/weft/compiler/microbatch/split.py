"""Cut the batch in time: the same training step, computed in micro-batches.

Before: the whole-batch graph, without layouts. After: leaves of the batch are (micro-batches, part,
...), calls on one micro-batch run once for each (the loop), all others once a step. Time is one more
axis along which rules split calls: a gradient is Partial along it and is accumulated, as late as
its readers allow; what is Split is packed where it is wanted whole. Masks and counts are those of
the whole batch. Only BatchNorm sees micro-batches, as when gradients are accumulated in PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from weft.compiler.context import Context
from weft.compiler.families.family import SampleStatistics
from weft.compiler.families.table import sample_statistics
from weft.compiler.microbatch.facts import Facts, facts, own_buffers
from weft.compiler.microbatch.forms import (
    Form,
    Own,
    Source,
    Strided,
    Way,
    cheapest,
    micro_call,
    of_parts,
    reading,
    reshaped,
    ways,
)
from weft.compiler.microbatch.order import in_order
from weft.compiler.microbatch.prepare import prepared
from weft.compiler.microbatch.samples import check_saved, check_size, over_samples
from weft.compiler.microbatch.values import Values
from weft.ir.logical import Call, Input, LogicalGraph, Node, Output, Ref, Update
from weft.ir.queries.op_calls import op_call, operand_names
from weft.layout import Broadcast, Partial, Split
from weft.ops import OpCall
from weft.ops.rule import factors_of
from weft.ops.rules.tensors.views import reshape_factors

# The way that was chosen for a call of some sources, and what runs then for each micro-batch.
_Chosen: TypeAlias = dict[tuple[OpCall, tuple[Source, ...]], tuple[Way, OpCall]]


def split_time(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The step in micro-batches.

    Args:
        graph: of the whole batch.
        context: with the number of equal parts of the batch; with 1 the graph stays as it is.

    Raises:
        StrategyError: naming the leaf that cannot be cut into equal parts, the BatchNorm whose
            micro-batches are too small, or what differentiates the gradient of one again.
        RuleError: when an op has no rule.
    """
    micro_batches = context.options.micro_batches
    if micro_batches == 1:
        return graph
    graph = prepared(graph, context.placement.device_type)
    known = facts(graph, micro_batches)
    split, values = _walked(graph, micro_batches, known)
    own = own_buffers(graph, [name for name, form in values.forms.items() if form == Own()])
    if own:
        split, _ = _walked(graph, micro_batches, replace(known, own=own))
    return in_order(split, {name: graph.values[name] for name in known.leaves})


def _walked(graph: LogicalGraph, micro_batches: int, known: Facts) -> tuple[LogicalGraph, Values]:
    """The nodes of the step in micro-batches, not in order yet, and how its values are made."""
    values = Values(graph, micro_batches, known)
    inputs = [_input(values, node) for node in graph.of_kind(Input)]
    chosen: _Chosen = {}
    for call in graph.of_kind(Call):
        _call(values, call, chosen)
    ends = [_end(values, node) for node in graph.nodes if isinstance(node, Update | Output)]
    nodes = (*inputs, *values.calls, *ends)
    return LogicalGraph(graph.name, nodes, micro_batches), values


def _input(values: Values, node: Input) -> Input:
    name, shape = node.value.name, node.value.shape
    if name in values.facts.leaves:
        values.forms[name] = Split(0)
        parts = (values.micro_batches, shape[0] // values.micro_batches)
        return replace(node, value=replace(node.value, shape=(*parts, *shape[1:])), cut=True)
    if name in values.facts.own:
        values.forms[name] = Own()
    else:
        values.note(name, Broadcast(), node.value)
    return node


def _call(values: Values, node: Call, chosen: _Chosen) -> None:
    """Add the call of a micro-batch, or of the step, for a call of the whole batch.

    Equal calls of equal sources, such as those of repeated layers, run in the way `chosen` first.
    """
    made = [value.name for value in node.outputs if value is not None]
    operands = operand_names(node)
    if values.facts.nothing.issuperset(made):
        return  # made where it is read, in the form that is wanted there
    sources = tuple(values.source(name, node.phase) for name in operands)
    call = op_call(values.graph, node)
    statistics = sample_statistics(node)
    if statistics is not None and over_samples(statistics, sources[0].form):
        _of_samples(values, node, call, statistics)
        return
    check_saved(values, node, operands)
    if factors_of(node.op) is reshape_factors and _viewed(values, node, call, sources[0].form):
        return
    found = chosen.get((call, sources))
    if found is None:
        every = ways(call, sources, values.micro_batches)
        # A check comes once a step, of the whole result, before updates that follow all micro-batches.
        once = node.op == "weft.required"
        way = next(every) if once else cheapest(every, sources, values.facts.batch)
        found = way, of_parts(node, call, way.signature, values.micro_batches)
        chosen[call, sources] = found
    way, each = found
    wanted = zip(operands, way.operands, strict=True)
    reads = [values.operand(name, form, node.phase) for name, form in wanted]
    micro = reading(node, each, reads)
    own = any(source.form == Own() for source in sources)
    _add(values, micro, [Own() if own and form == Broadcast() else form for form in way.results])


def _viewed(values: Values, node: Call, call: OpCall, form: Form | None) -> bool:
    """Add a view of a value that is split, where its parts can be viewed alike; whether they can."""
    (old,) = node.outputs
    assert old is not None  # a view is a tensor
    found = (
        reshaped(form, call.operands[0].shape, old.shape, values.micro_batches) if form else None
    )
    if form is None or found is None:
        return False
    length = old.shape[found.dim] // values.micro_batches
    shape = (*old.shape[: found.dim], length, *old.shape[found.dim + 1 :])
    read = values.read(operand_names(node)[0], form, node.phase)
    made = replace(old, shape=shape)
    args = (Ref(read.name), shape)
    view = replace(node, op="aten.reshape.default", args=args, kwargs=(), outputs=(made,))
    _add(values, view, [found])
    return True


def _of_samples(values: Values, node: Call, call: OpCall, statistics: SampleStatistics) -> None:
    """A call that takes statistics, or its backward, of the samples of a micro-batch alone."""
    names = operand_names(node)
    form = values.forms[names[0]]
    assert isinstance(form, Split | Strided)
    check_size(values.micro_batches, node, call, statistics)
    way = Way(statistics.signature(call, form.dim), form.outer if isinstance(form, Strided) else 1)
    wanted = zip(names, way.operands, strict=True)
    reads = [values.operand(name, each, node.phase) for name, each in wanted]
    micro = micro_call(node, call, way.signature, reads, values.micro_batches)
    once: Form = Partial("sum") if statistics.adds(node) else Own()
    _add(values, micro, [once if each == Broadcast() else each for each in way.results])


def _add(values: Values, call: Call, forms: list[Form]) -> None:
    values.calls.append(call)
    for value, form in zip(call.outputs, forms, strict=True):
        if value is not None:
            values.note(value.name, form, value)


def _end(values: Values, node: Node) -> Node:
    if isinstance(node, Update):
        # BatchNorm's buffers get a new version from each micro-batch.
        follows = node.target.name in values.facts.own
        each = follows and values.forms.get(node.source.name) == Own()
        form: Form = Own() if each else Broadcast()
        return replace(node, source=Ref(values.read(node.source.name, form).name))
    assert isinstance(node, Output)
    return replace(node, value=Ref(values.read(node.value.name, Broadcast()).name))
