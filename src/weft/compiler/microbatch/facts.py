"""The facts of a graph that the split in time needs before it walks it: origins of values.

Leaves of the batch are cut into micro-batches: a user's dimension d is dimension d + 1 of the input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import final

from weft.compiler.context import Context
from weft.compiler.families.table import sample_statistics, takes_statistics
from weft.compiler.hints import Hints
from weft.compiler.microbatch.prepare import cut_leaves
from weft.errors import StrategyError
from weft.ir.logical import Call, Input, LogicalGraph, Update
from weft.layout import SBP, Split


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
    of_batch, of_model = set(leaves), _variables(graph)
    for node in graph.of_kind(Call):
        uses, made = node.uses, {value.name for value in node.outputs if value}
        if all(name in nothing for name in uses):
            nothing |= made
        if any(name in of_batch for name in uses):
            of_batch |= made
        if takes_statistics(node) or any(name in of_model for name in uses):
            of_model |= made
    whole = frozenset(graph.values) - (of_batch & of_model)
    return Facts(batch, leaves, frozenset(nothing), whole, _saved(graph))


def _leaves(graph: LogicalGraph, micro_batches: int) -> tuple[int, frozenset[str]]:
    """The size of the batch, and the leaves that have it as their first dimension."""
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
            f"micro_batches={micro_batches}: the batch leaf {cut[0].key!r} of shape "
            f"{list(cut[0].value.shape)} has {size} samples, which make no {micro_batches} equal "
            f"parts; take a number of micro-batches that divides {size}, or a batch of a multiple "
            f"of {micro_batches}; where it is the last, smaller batch of an epoch, drop_last=True of the loader leaves "
            "it out"
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
            found.update(value.name for value in node.outputs if value is not None)
    return frozenset(found)


def _variables(graph: LogicalGraph) -> set[str]:
    """Parameters, and whatever a step writes."""
    inputs: list[Input] = graph.of_kind(Input)
    written = {ref.name for node in graph.of_kind(Update) for ref in (node.target, *node.states)}
    return {node.value.name for node in inputs if node.role == "parameter"} | written


def own_buffers(graph: LogicalGraph, statistics: Collection[str]) -> frozenset[str]:
    """The buffers of modules of which one follows a statistic that each micro-batch has of its own."""
    copied = {
        node.target.name: (_module(graph, node.target.name), node.source.name)
        for node in graph.of_kind(Update)
        if node.rule == "copy"
    }
    modules = {module for module, new in copied.values() if _follows(graph, new, statistics)}
    return frozenset(name for name, (module, _) in copied.items() if module in modules)


def _module(graph: LogicalGraph, name: str) -> str:
    producer = graph.producers[name]
    return producer.key.rpartition(".")[0] if isinstance(producer, Input) else ""


# What stands between a statistic and the new version of a buffer that follows it.
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
    return replace(context, hints={axes: _cut(one, keys) for axes, one in context.hints.items()})


def _cut(hints: Hints, keys: Collection[str]) -> Hints:
    """The hints with a dimension in front of those of some inputs."""
    inputs = {
        key: tuple(map(_moved, sbps)) if key in keys else sbps for key, sbps in hints.inputs.items()
    }
    return replace(hints, inputs=inputs)


def _moved(sbp: SBP | None) -> SBP | None:
    return Split(sbp.dim + 1) if isinstance(sbp, Split) else sbp
