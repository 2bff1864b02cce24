"""The table of decompositions, and what the passes ask of it."""

from __future__ import annotations

from collections.abc import Iterator

from weft.compiler.assignment import Assignment
from weft.compiler.decompositions import batch_norm, log_softmax
from weft.compiler.decompositions.decomposition import (
    DecomposableCall,
    Decomposition,
    Placed,
    SampleStatistics,
    replaced,
)
from weft.hardware import CostModel
from weft.ir.logical import Call, LogicalGraph
from weft.ops import OpCall, Signature, signatures_with_windows

FAMILIES = (log_softmax.FAMILY, log_softmax.NLL_LOSS, batch_norm.FAMILY)

_FAMILIES = {op: family for family in FAMILIES for op in family.ops}
_MADE_BY = {
    family.statistics.made_by: family.statistics for family in FAMILIES if family.statistics
}


def decomposition_of(op: str) -> Decomposition | None:
    """The decomposition of an op; None if its rule says all."""
    return _FAMILIES.get(op)


def legal_signatures(call: OpCall, parts: int, empty: bool = False) -> tuple[Signature, ...]:
    """The signatures of one call's rule, and those of its decomposition."""
    declared = signatures_with_windows(call, parts, empty)
    family = decomposition_of(call.op)
    return (*declared, *family.signatures(call, parts, empty)) if family else declared


def reduction_cost(
    call: OpCall, signature: Signature, grid: tuple[int, ...], axis: int, model: CostModel
) -> float:
    """The cost of the reductions inside of a call that is decomposed when split so along `axis`; else 0."""
    family = decomposition_of(call.op)
    return family.cost(call, signature, grid, axis, model) if family else 0.0


def expand(graph: LogicalGraph, assignment: Assignment) -> tuple[LogicalGraph, Assignment]:
    """Take apart every call that was given a layout in which its op cannot run as one."""
    values = dict(assignment.values)
    instead: dict[int, tuple[Placed, ...]] = {}
    for index, node in enumerate(graph.nodes):
        family = decomposition_of(node.op) if isinstance(node, Call) else None
        if family is not None and isinstance(node, Call) and index in assignment.operands:
            calls = tuple(
                family.expand(DecomposableCall(graph, node, assignment.operands[index], values))
            )
            if calls:
                instead[index] = calls
    return replaced(graph, assignment, instead, values) if instead else (graph, assignment)


def sample_statistics(call: Call | OpCall) -> SampleStatistics | None:
    """The kind of statistics over samples that a call takes, forward or backward; None if it takes none."""
    family = decomposition_of(call.op)
    found = family.statistics if family else None
    return found if found is not None and found.applies(call) else None


def takes_statistics(call: Call | OpCall) -> bool:
    """True if a call takes statistics over samples, forward."""
    found = sample_statistics(call)
    return found is not None and found.takes(call)


def with_statistics(calls: list[Call]) -> Iterator[tuple[Call, SampleStatistics]]:
    """The calls that make statistics over samples, decomposed or not, with what is known of these."""
    for call in calls:
        found = _MADE_BY.get(call.op) or (
            sample_statistics(call) if takes_statistics(call) else None
        )
        if found is not None:
            yield call, found
