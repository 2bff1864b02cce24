"""Cut the batch into micro-batches: the same training step, one micro-batch at a time.

Before: the whole-batch graph, without layouts. After: entries of the batch are (micro-batches, part,
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
from weft.compiler.graph.rewriting import only_result
from weft.compiler.microbatch.facts import Facts, facts, own_buffers, prepared
from weft.compiler.microbatch.forms import (
    Form,
    Own,
    Source,
    Strided,
    Way,
    cheapest_signature,
    form_of_view,
    micro_call,
    of_parts,
    reading,
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
            micro-batches are too small, or the op that differentiates a BatchNorm's gradient.
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
    inputs: list[Input] = []
    for leaf in graph.of_kind(Input):
        name, value = leaf.value.name, leaf.value
        if name in known.leaves:
            values.forms[name] = Split(0)
            leaf = replace(leaf, value=replace(value, shape=values.cut(value)), cut=True)
        elif name in known.own:
            values.forms[name] = Own()
        else:
            values.note(name, Broadcast(), value)
        inputs.append(leaf)
    chosen: _Chosen = {}
    for call in graph.of_kind(Call):
        _call(values, call, chosen)
    ends: list[Node] = []
    for node in graph.nodes:
        if isinstance(node, Update):
            # BatchNorm's buffers get a new version from each micro-batch.
            own = node.target.name in known.own and values.forms.get(node.source.name) == Own()
            made = values.read(node.source.name, Own() if own else Broadcast())
            ends.append(replace(node, source=Ref(made.name)))
        elif isinstance(node, Output):
            made = values.read(node.value.name, Broadcast())
            ends.append(replace(node, value=Ref(made.name)))
    return LogicalGraph(graph.name, (*inputs, *values.calls, *ends), micro_batches), values


def _call(values: Values, node: Call, chosen: _Chosen) -> None:
    """Add the call of a micro-batch, or of the step, for a call of the whole batch.

    Equal calls of equal sources, such as those of repeated layers, run in the way `chosen` first.
    """
    if values.facts.nothing.issuperset(value.name for value in node.makes):
        return  # made where it is read, in the form that is wanted there
    sources = tuple(values.source(name, node.phase) for name in node.operands)
    form, statistics = sources[0].form if sources else None, sample_statistics(node)
    # For what is split along samples, each micro-batch has statistics of its own.
    if statistics and isinstance(form, Split | Strided) and statistics.over(form.dim):
        _of_samples(values, node, form, statistics)
        return
    check_saved(values, node)
    if factors_of(node.op) is reshape_factors and _viewed(values, node, form):
        return
    call = node.first
    found = chosen.get((call, sources))
    if found is None:
        every = ways(call, sources, values.micro_batches)
        # A check comes once a step, of the whole result, before updates that follow all micro-batches.
        once = node.op == "weft.required"
        way = next(every) if once else cheapest_signature(every, sources, values.facts.batch)
        found = way, of_parts(node, way.signature, values.micro_batches)
        chosen[call, sources] = found
    way, each = found
    micro = reading(node, each, _reads(values, node, way))
    own = any(source.form == Own() for source in sources)
    _add(values, micro, [Own() if own and form == Broadcast() else form for form in way.results])


def _reads(values: Values, node: Call, way: Way) -> list[Value]:
    wanted = zip(node.operands, way.operands, strict=True)
    return [values.operand(name, form, node.phase) for name, form in wanted]


def _viewed(values: Values, node: Call, form: Form | None) -> bool:
    """Add a view of a value that is split, where its parts can be viewed alike; whether they can."""
    old, source = only_result(node), values.graph.values[node.operands[0]].shape
    found = form_of_view(form, source, old.shape, values.micro_batches) if form else None
    if form is None or found is None:
        return False
    made = replace(old, shape=values.shape(old, found))
    args = (values.read(node.operands[0], form, node.phase).ref, made.shape)
    view = node.changed(op="aten.reshape.default", args=args, kwargs=(), outputs=(made,))
    _add(values, view, [found])
    return True


def _of_samples(
    values: Values, node: Call, form: Split | Strided, statistics: SampleStatistics
) -> None:
    """A call that takes statistics, or its backward, of the samples of a micro-batch alone."""
    own = statistics.size(node.first) // values.micro_batches
    if own < 2:
        raise StrategyError(
            f"micro_batches={values.micro_batches} leaves the {statistics.name} at {node.location} {own} value for "
            "each channel of a micro-batch, expected more than 1; take fewer micro-batches"
        )
    outer = form.outer if isinstance(form, Strided) else 1
    way = Way(statistics.signature(node.first, form.dim), outer)
    micro = micro_call(node, way.signature, _reads(values, node, way), values.micro_batches)
    once: Form = Partial("sum") if statistics.adds(node) else Own()
    _add(values, micro, [once if each == Broadcast() else each for each in way.results])


def _add(values: Values, call: Call, forms: list[Form]) -> None:
    values.calls.append(call)
    for value, form in zip(call.outputs, forms, strict=True):
        if value is not None:
            values.note(value.name, form, value)


def check_saved(values: Values, node: Call) -> None:
    """Refuse ops beside the backward that read per-micro-batch statistics, such as a double backward.

    Its sums over samples would be taken over all micro-batches, which do not share the statistics.
    A cast is none: kernels save in other dtypes than shapes say.
    """
    saved = values.facts.saved.intersection(node.operands)
    if node.op != "aten._to_copy.default" and any(values.forms.get(x) == Own() for x in saved):
        raise StrategyError(
            f"micro_batches={values.micro_batches}: the gradient of a BatchNorm is differentiated again at "
            f"{node.location}, as a gradient penalty does. Each micro-batch has statistics of its own, expected "
            "those of the whole batch there; leave micro_batches out, or take a norm over each sample, such as "
            "nn.GroupNorm or nn.LayerNorm, where the penalty's gradient passes"
        )


def in_order(graph: LogicalGraph, leaves: Mapping[str, Value]) -> LogicalGraph:
    """The graph of a step in micro-batches, with its nodes in order, without calls whose results nobody reads.

    A call that makes one value of all micro-batches is right after its operands, so that no micro-batch's value
    waits. Calls that run once a step are in the loop when the loop reads what they make of the loop's results.
    """
    calls, ends = graph.of_kind(Call), [x for x in graph.nodes if not isinstance(x, Input | Call)]
    kept = _needed(calls, ends)
    calls = _joins_early([call for index, call in enumerate(calls) if index in kept])
    loop, late = _kinds(calls)
    barrier = _needed(calls, [call for index, call in enumerate(calls) if index in loop])
    places: tuple[list[Call], list[Call], list[Call]] = ([], [], [])
    for index, call in enumerate(calls):
        inside = index in loop or (index in late and index in barrier)
        places[1 if inside else 2 * (index in late)].append(call)
    ordered = replace(graph, nodes=(*graph.of_kind(Input), *chain(*places), *ends))
    return _whole_leaves(ordered, leaves)


def _needed(calls: Sequence[Call], readers: Iterable[Node]) -> set[int]:
    used = {name for node in readers for name in node.uses}
    found = set()
    for index in reversed(range(len(calls))):
        if any(value.name in used for value in calls[index].makes):
            used.update(calls[index].uses)
            found.add(index)
    return found


def _joins_early(calls: Sequence[Call]) -> list[Call]:
    """The calls, with those that make one value of all micro-batches right after what they read."""
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
    """The places of calls that run once for each micro-batch, and of those that wait for all micro-batches."""
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
    """The graph in which leaves of which no micro-batch reads a part are inputs as they were."""
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
