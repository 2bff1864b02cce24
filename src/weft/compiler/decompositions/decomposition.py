"""Decompositions: ops that deduction sees as one call and that become several where their layouts split them.

A decomposition says in one module what its ops do beyond their rules (`weft.ops.rules`): which signatures
are legal because the call can be decomposed, what the reductions inside cost, which calls it
becomes, and what it does to samples that come in micro-batches. `weft.compiler.decompositions.table`
lists the decompositions; deduction, the split in time and `explain` ask there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from weft.compiler.assignment import Assignment
from weft.hardware import CostModel
from weft.ir.logical import Call, LogicalGraph, Node
from weft.layout import Layout
from weft.ops import OpCall, Signature, TensorSpec

# A call and the layouts in which it reads its operands.
Placed: TypeAlias = "tuple[Call, tuple[Layout, ...]]"
# The name of a result, and the calls that make the same of the batch.
Count: TypeAlias = tuple[str, tuple[Call, ...]]


@final
@dataclass(frozen=True)
class DecomposableCall:
    """A call that may be decomposed.

    Attributes:
        values: layouts of all values; an expansion notes those of the values that it makes.
    """

    graph: LogicalGraph
    call: Call
    reads: tuple[Layout, ...]
    values: dict[str, Layout]


@final
@dataclass(frozen=True)
class SampleStatistics:
    """Ops that take statistics over the samples of a batch, of which each micro-batch has its own.

    Attributes:
        name: of the module that users know, such as "BatchNorm".
        applies: true if a call takes such statistics, or is the backward of one that does.
        takes: true if it is a forward that takes them.
        adds: true if results that are not samples are summed over micro-batches, as gradients are.
        over: true if statistics are taken over a dimension.
        signature: of a call whose samples are split along a dimension.
        size: numbers that make one statistic.
        made_by: the op that makes them where the call is decomposed.
        saved: of a forward, the results that it keeps for its backward alone.
    """

    name: str
    applies: Callable[[Call | OpCall], bool]
    takes: Callable[[Call | OpCall], bool]
    adds: Callable[[Call], bool]
    over: Callable[[int], bool]
    signature: Callable[[OpCall, int], Signature]
    size: Callable[[OpCall], int]
    made_by: str
    saved: tuple[int, ...]


@final
@dataclass(frozen=True)
class Decomposition:
    """A decomposition: everything about its ops beyond their rules.

    Attributes:
        ops: the ops that it covers.
        signatures: (call, parts, empty) -> legal signatures along an axis of `parts` ranks besides
            those of the rule; with `empty`, also those that leave ranks without elements.
        cost: (call, signature, grid, axis, model) -> what the reductions inside cost when the call
            is split so along `axis`, in the model's bytes; the call has the shapes that it has
            along `axis` before it is split.
        expand: the calls in its place, in order; none if the call stays.
        statistics: where it takes statistics over samples.
        counts: results of a call that depend on the batch alone, each with the calls that make it
            of the batch, so that micro-batches need not wait for one another.
        ignores_counts: true if a call takes such a number without looking at it.
    """

    ops: frozenset[str]
    signatures: Callable[[OpCall, int, bool], tuple[Signature, ...]] = lambda *_: ()
    cost: Callable[[OpCall, Signature, tuple[int, ...], int, CostModel], float] = lambda *_: 0.0
    expand: Callable[[DecomposableCall], Iterable[Placed]] = lambda _: ()
    statistics: SampleStatistics | None = None
    counts: Callable[[LogicalGraph, Call], Iterable[Count]] = lambda *_: ()
    ignores_counts: Callable[[Call], bool] = lambda _: False


def replaced(
    graph: LogicalGraph,
    assignment: Assignment,
    instead: Mapping[int, Sequence[Placed]],
    values: Mapping[str, Layout],
) -> tuple[LogicalGraph, Assignment]:
    """The graph with other calls in place of some nodes.

    Args:
        instead: for the number of a node the calls that take its place; it may be none.
    """
    nodes: list[Node] = []
    operands: dict[int, tuple[Layout, ...]] = {}
    remade: dict[str, TensorSpec] = {}  # in another dtype
    for index, node in enumerate(graph.nodes):
        if index not in instead and index in assignment.operands:
            operands[len(nodes)] = assignment.operands[index]
        placed = instead.get(index)
        if placed is None:
            nodes.append(_reading(node, remade) if isinstance(node, Call) else node)
            continue
        for call, reads in placed:
            operands[len(nodes)] = reads
            nodes.append(_reading(call, remade))
            made = (value for value in call.makes if value.name in graph.values)
            remade.update(
                (value.name, value.spec)
                for value in made
                if value.spec != graph.values[value.name].spec
            )
    return graph.with_nodes(nodes), replace(assignment, values=dict(values), operands=operands)


def _reading(call: Call, remade: Mapping[str, TensorSpec]) -> Call:
    """`call` with the dtypes of what it reads."""
    if remade.keys().isdisjoint(call.operands):
        return call
    pairs = zip(call.operands, call.call.operands, strict=True)
    operands = tuple([remade.get(name, spec) for name, spec in pairs])
    return replace(call, call=replace(call.call, operands=operands))
