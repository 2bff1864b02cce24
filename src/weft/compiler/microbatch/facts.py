"""The facts of a graph that the split into micro-batches needs: the origins of values.

Entries of the batch are cut into micro-batches: a user's dimension d is dimension d + 1 of the input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

from weft.compiler.context import Context
from weft.compiler.decompositions.table import decomposition_of, sample_statistics, takes_statistics
from weft.compiler.graph.rewriting import only_result
from weft.compiler.hints import Hints
from weft.errors import StrategyError
from weft.ir.logical import Call, Input, LogicalGraph, Node, PerMicroBatch, Ref, Update
from weft.ir.nodes import renamed
from weft.layout import Split
from weft.ops.call import Token
from weft.ops.rule import factors_of
from weft.ops.rules.common import pointwise
from weft.ops.rules.views import reshape_factors


@final
@dataclass(frozen=True)
class Facts:
    """The origins of values.

    Attributes:
        batch: size of the whole batch: the first dimension of most leaves.
        leaves: the inputs that are cut into micro-batches.
        nothing: values that depend on no input: numbers, ranges, random masks.
        whole: values that can be made whole, once a step, before any micro-batch: what depends on
            the batch alone, or not on it.
        saved: statistics over samples, as BatchNorm's, that are kept for its backward alone; casts of them too.
        own: buffers with a new version for each micro-batch, as BatchNorm has them.
    """

    batch: int
    leaves: frozenset[str]
    nothing: frozenset[str]
    whole: frozenset[str]
    saved: frozenset[str]
    own: frozenset[str] = frozenset()


def facts(graph: LogicalGraph, micro_batches: int) -> Facts:
    """The facts about a graph whose batch is to be cut.

    Raises:
        StrategyError: naming the leaf that cannot be cut into equal parts.
    """
    batch, leaves = _leaves(graph, micro_batches)
    nothing: set[str] = set()
    # Parameters, and whatever a step writes.
    updates: list[Update] = graph.of_kind(Update)
    of_model = {ref.name for node in updates for ref in (node.target, *node.states)}
    of_model |= {node.value.name for node in graph.of_kind(Input) if node.role == "parameter"}
    of_batch = set(leaves)
    for node in graph.of_kind(Call):
        uses, made = node.uses, {value.name for value in node.makes}
        if all(name in nothing for name in uses):
            nothing |= made
        if any(name in of_batch for name in uses):
            of_batch |= made
        if takes_statistics(node) or any(name in of_model for name in uses):
            of_model |= made
    whole = frozenset(graph.values) - (of_batch & of_model)
    return Facts(batch, leaves, frozenset(nothing), whole, _saved(graph))


def _leaves(graph: LogicalGraph, micro_batches: int) -> tuple[int, frozenset[str]]:
    leaves = [node for node in graph.of_kind(Input) if node.role == "batch"]
    sizes = Counter(node.value.shape[0] for node in leaves if node.value.shape)
    if not sizes:
        raise StrategyError(
            f"micro_batches={micro_batches} cuts the first dimension of the batch's tensors, but "
            "none of them has a dimension; leave micro_batches out"
        )
    size = sizes.most_common(1)[0][0]
    cut = [node for node in leaves if node.value.shape[:1] == (size,)]
    if size % micro_batches or not size:
        raise StrategyError(
            f"{size} samples cannot be divided into micro_batches={micro_batches}: the batch leaf {cut[0].key!r} has "
            f"shape {list(cut[0].value.shape)}; take a number of micro-batches that divides {size}, or a batch of a "
            f"multiple of {micro_batches}; where it is the last, smaller batch of an epoch, drop_last=True of the "
            "loader leaves it out"
        )
    return size, frozenset(node.value.name for node in cut)


def _saved(graph: LogicalGraph) -> frozenset[str]:
    """The statistics that calls keep for the backward, as they are or in another dtype."""
    found: set[str] = set()
    for node in graph.of_kind(Call):
        statistics = sample_statistics(node)
        if statistics is not None and statistics.takes(node):
            kept = (node.outputs[each] for each in statistics.saved)
            found.update(value.name for value in kept if value is not None)
        elif node.op == "aten._to_copy.default" and not found.isdisjoint(node.uses):
            found.update(value.name for value in node.makes)
    return frozenset(found)


def own_buffers(graph: LogicalGraph, statistics: Collection[str]) -> frozenset[str]:
    """The buffers of modules of which one follows a statistic that each micro-batch has of its own."""
    copied: dict[str, tuple[str, str]] = {}
    for node in graph.of_kind(Update):
        if node.rule == "copy":
            buffer = graph.producers[node.target.name]
            module = buffer.key.rpartition(".")[0] if isinstance(buffer, Input) else ""
            copied[node.target.name] = module, node.source.name
    modules = {module for module, new in copied.values() if _follows(graph, new, statistics)}
    return frozenset(name for name, (module, _) in copied.items() if module in modules)


# Ops between a statistic and the new version of the buffer that follows it.
_MIXING = ("aten.add", "aten.sub", "aten.mul", "aten.lerp", "aten._to_copy", "aten.where")


def _follows(graph: LogicalGraph, name: str, statistics: Collection[str]) -> bool:
    node = graph.producers[name]
    if isinstance(node, Call) and takes_statistics(node):
        return name in statistics
    if not isinstance(node, Call) or not node.op.startswith(_MIXING):
        return False
    return name in statistics or any(_follows(graph, use, statistics) for use in node.uses)


def on_cut_leaves(graph: LogicalGraph, context: Context) -> Context:
    """Decide what hints for the batch as the user has it ask of the inputs of a graph in micro-batches."""
    cut = cut_leaves(graph)
    keys = {node.key for node in graph.of_kind(Input) if node.value.name in cut}
    hints: dict[int, Hints] = {}
    for axes, one in context.hints.items():
        moved = {
            key: tuple([Split(sbp.dim + 1) if isinstance(sbp, Split) else sbp for sbp in sbps])
            for key, sbps in one.inputs.items()
            if key in keys
        }
        hints[axes] = replace(one, inputs={**one.inputs, **moved})
    return replace(context, hints=hints)


# Before a batch is cut in time: what need not wait for micro-batches is alone.
#
# That is what only borrows a shape or a device, counts of targets, and sums over an entry of the batch, which are taken
# of the leaf as it is cut, once a step, so that no rank has to gather it.


# Ops that take device, dtype or shape from a tensor whose values do not matter; what each is
# without it, and where its value is in the arguments.
_BORROWERS: dict[str, tuple[str, int | None]] = {
    "aten.new_zeros.default": ("aten.zeros.default", None),
    "aten.new_ones.default": ("aten.ones.default", None),
    "aten.new_empty.default": ("aten.empty.memory_format", None),
    "aten.new_full.default": ("aten.full.default", 2),
    "aten.zeros_like.default": ("aten.zeros.default", None),
    "aten.ones_like.default": ("aten.ones.default", None),
    "aten.empty_like.default": ("aten.empty.memory_format", None),
    "aten.full_like.default": ("aten.full.default", 1),
    "aten.zero.default": ("aten.zeros.default", None),
    "aten.fill.Scalar": ("aten.full.default", 1),
}


def prepared(graph: LogicalGraph, device_type: str) -> LogicalGraph:
    """The same step, in which fewer values depend on others."""
    nodes: list[Node] = []
    names: dict[str, str] = {}
    for node in graph.nodes:
        family = decomposition_of(node.op) if isinstance(node, Call) else None
        if not (family and isinstance(node, Call) and family.ignores_counts(node)):
            node = renamed(node, names)
        if isinstance(node, Call) and node.op in _BORROWERS:
            op, position = _BORROWERS[node.op]
            value = () if position is None else (node.args[position],)
            if not any(isinstance(each, Ref) for each in value):
                made = only_result(node)
                device = dict(node.kwargs).get("device", Token("device", device_type))
                kwargs = (("dtype", Token("dtype", made.dtype)), ("device", device))
                node = node.changed(op=op, args=(made.shape, *value), kwargs=kwargs)
        if family is not None and isinstance(node, Call):
            for result, counting in family.counts(graph, node):
                nodes += counting
                names[result] = only_result(counting[-1]).name
        nodes.append(node)
    return graph.with_nodes(nodes)


_SUM_OP = "aten.sum.default"


def sum_of_leaf(
    graph: LogicalGraph, name: str, leaves: frozenset[str]
) -> tuple[str, tuple[Call, ...]] | None:
    """The leaf that `name` sums up, and the calls on its elements in between, the sum last.

    None if there is no such sum. A sum does not depend on the order of elements, so views are left out.
    """
    node = graph.producers[name]
    if not isinstance(node, Call) or node.op != _SUM_OP:
        return None
    calls = [node]
    (current,) = node.operands
    while current not in leaves:
        maker = graph.producers[current]
        if not isinstance(maker, Call) or len(maker.operands) != 1 or len(maker.outputs) != 1:
            return None
        (before,), made, factors = maker.operands, maker.outputs[0], factors_of(maker.op)
        shapes = graph.values[before].shape, made.shape if made else ()
        if factors is pointwise and made and shapes[0] == shapes[1]:
            calls.append(maker)
        elif factors is not reshape_factors or not made or prod(shapes[0]) != prod(shapes[1]):
            return None
        current = before
    return current, tuple(reversed(calls))


def join_per_micro_batch(parts: tuple[Any, ...]) -> Any:
    """One argument tree from those of all micro-batches: `PerMicroBatch` where leaves differ.

    All parts must have the same tuples in them.
    """
    if all(part == parts[0] and type(part) is type(parts[0]) for part in parts):
        return parts[0]
    if all(isinstance(part, tuple) and len(part) == len(parts[0]) for part in parts):
        return tuple(join_per_micro_batch(leaves) for leaves in zip(*parts, strict=True))
    return PerMicroBatch(parts)


def cut_leaves(graph: LogicalGraph) -> frozenset[str]:
    """The inputs that hold an entry of the batch as (micro-batches, part of the batch, ...)."""
    return frozenset(node.value.name for node in graph.of_kind(Input) if node.cut)
