"""Cut the batch in time: the same training step, computed in micro-batches.

Before: the whole-batch graph, without layouts. After: leaves of the batch are (micro-batches, part,
...), calls on one micro-batch run once for each (the loop), all others once a step. Time is one more
axis along which rules split calls: a gradient is Partial along it and is accumulated, as late as
its readers allow; what is Split is packed where it is wanted whole. Masks and counts are those of
the whole batch. Only BatchNorm sees micro-batches, as when gradients are accumulated in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from weft.compiler.context import Context
from weft.compiler.decompositions.decomposition import SampleStatistics
from weft.compiler.decompositions.table import sample_statistics
from weft.compiler.microbatch.facts import Facts, facts, own_buffers, prepared
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
from weft.compiler.microbatch.values import SELECT, Values
from weft.errors import StrategyError
from weft.ir.logical import (
    Call,
    Input,
    LogicalGraph,
    Node,
    Output,
    Ref,
    Update,
    Value,
    runs_in_loop,
)
from weft.ir.nodes import OVER_STEP, renamed
from weft.layout import Broadcast, Partial, Split
from weft.ops import OpCall
from weft.ops.rule import factors_of
from weft.ops.rules.views import reshape_factors

# The way that was chosen for a call of some sources, and what runs then for each micro-batch.
_Chosen: TypeAlias = dict[tuple[OpCall, tuple[Source, ...]], tuple[Way, OpCall]]


def split_time(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The step in micro-batches.

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
    made = [value.name for value in node.makes]
    operands = node.operands
    if values.facts.nothing.issuperset(made):
        return  # made where it is read, in the form that is wanted there
    sources = tuple(values.source(name, node.phase) for name in operands)
    call = node.first
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
    read = values.read(node.operands[0], form, node.phase)
    made = replace(old, shape=shape)
    args = (read.ref, shape)
    view = node.changed(op="aten.reshape.default", args=args, kwargs=(), outputs=(made,))
    _add(values, view, [found])
    return True


def _of_samples(values: Values, node: Call, call: OpCall, statistics: SampleStatistics) -> None:
    """A call that takes statistics, or its backward, of the samples of a micro-batch alone."""
    names = node.operands
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


def over_samples(statistics: SampleStatistics, form: Form | None) -> bool:
    """True where statistics of a value in this form are taken over samples: each micro-batch has its own."""
    return isinstance(form, Split | Strided) and statistics.over(form.dim)


def check_size(micro_batches: int, node: Call, call: OpCall, statistics: SampleStatistics) -> None:
    """Refuse statistics of a single value."""
    own = statistics.size(call) // micro_batches
    if own < 2:
        raise StrategyError(
            f"micro_batches={micro_batches} leaves the {statistics.name} at {node.location} {own} value for "
            "each channel of a micro-batch, expected more than 1; take fewer micro-batches"
        )


def check_saved(values: Values, node: Call, operands: Sequence[str]) -> None:
    """Refuse what reads statistics of each micro-batch beside their backward: a gradient of that backward.

    Its sums over samples would be taken over all micro-batches, which do not share the statistics.
    A cast is none: kernels save in other dtypes than shapes say.
    """
    saved = (name for name in operands if name in values.facts.saved)
    if node.op != "aten._to_copy.default" and any(
        values.forms.get(name) == Own() for name in saved
    ):
        raise StrategyError(
            f"micro_batches={values.micro_batches}: the gradient of a BatchNorm is differentiated again at "
            f"{node.location}, as a gradient penalty does. Each micro-batch has statistics of its own, expected "
            "those of the whole batch there; leave micro_batches out, or take a norm over each sample, such as "
            "nn.GroupNorm or nn.LayerNorm, where the penalty's gradient passes"
        )


def in_order(graph: LogicalGraph, leaves: Mapping[str, Value]) -> LogicalGraph:
    """The graph of a step in micro-batches, with its nodes in order.

    A call that makes one value of all micro-batches stands right behind its operands, so that no
    micro-batch's value waits. Calls that run once a step stand in the loop when the loop reads what
    they make of the loop's results.
    """
    calls = _joins_early(_read(graph.of_kind(Call), graph.nodes))
    loop, late = _kinds(calls)
    barrier = _needed(calls, [call for index, call in enumerate(calls) if index in loop])
    places: tuple[list[Call], list[Call], list[Call]] = ([], [], [])
    for index, call in enumerate(calls):
        inside = index in loop or (index in late and index in barrier)
        places[1 if inside else 2 * (index in late)].append(call)
    ends = [node for node in graph.nodes if not isinstance(node, Input | Call)]
    ordered = replace(graph, nodes=(*graph.of_kind(Input), *chain(*places), *ends))
    return _whole_leaves(ordered, leaves)


def _read(calls: Sequence[Call], nodes: Iterable[Node]) -> list[Call]:
    """The calls whose results somebody reads in the end."""
    ends = [node for node in nodes if not isinstance(node, Call)]
    kept = _needed(calls, ends)
    return [call for index, call in enumerate(calls) if index in kept]


def _needed(calls: Sequence[Call], readers: Iterable[Node]) -> set[int]:
    used = {name for node in readers for name in node.uses}
    found = set()
    for index in reversed(range(len(calls))):
        if any(value.name in used for value in calls[index].makes):
            used.update(calls[index].uses)
            found.add(index)
    return found


def _joins_early(calls: Sequence[Call]) -> list[Call]:
    joins: dict[str, list[Call]] = {}
    for call in calls:
        if call.op in OVER_STEP:
            joins.setdefault(call.uses[0], []).append(call)
    found = []
    for call in calls:
        if call.op not in OVER_STEP:
            found.append(call)
            found += [join for value in call.makes for join in joins.get(value.name, ())]
    return found


def _kinds(calls: Sequence[Call]) -> tuple[set[int], set[int]]:
    loop, late = set(), set()
    looped: set[str] = set()
    waiting: set[str] = set()
    for index, call in enumerate(calls):
        names = {value.name for value in call.makes}
        if runs_in_loop(call, looped):
            loop.add(index)
            (waiting if call.op in OVER_STEP else looped).update(names)
        elif any(name in waiting for name in call.uses):
            late.add(index)
            waiting |= names
    return loop, late


def _whole_leaves(graph: LogicalGraph, leaves: Mapping[str, Value]) -> LogicalGraph:
    read = {call.uses[0] for call in graph.of_kind(Call) if call.op == SELECT and call.varyings}
    uncut = leaves.keys() - read
    leaves = {name: leaves[name] for name in uncut}
    names: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        uses = node.uses
        leaf = leaves.get(uses[0]) if isinstance(node, Call) and uses else None
        if leaf is not None and node.makes[0].shape == leaf.shape:
            # The view of the whole leaf is the leaf now.
            names[node.makes[0].name] = uses[0]
        elif isinstance(node, Input) and node.value.name in uncut:
            nodes.append(replace(node, value=leaves[node.value.name], cut=False))
        elif isinstance(node, Call) and uses and uses[0] in uncut:
            nodes.append(node.on(leaves[uses[0]]))
        else:
            nodes.append(renamed(node, names))
    return graph.with_nodes(nodes)
