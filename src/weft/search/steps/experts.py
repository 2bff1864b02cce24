"""Parameters that hold the experts of mixtures in their first dimension, read off the captured step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import final

from weft.ir.logical import Call, LogicalGraph, Ref
from weft.ops.rules.own.experts import EXPERT_MM
from weft.search.steps.vocabularies import parameter_of

# Calls that read a table of biases, or numbers, at the experts of rows.
_INDEX = "aten.index.Tensor"


@final
@dataclass(frozen=True)
class Experts:
    """The experts of a model.

    Attributes:
        parameters: that hold all experts of a mixture, in their first dimension.
        count: what the numbers of experts of all mixtures are multiples of; 0 where there are none.
    """

    parameters: tuple[str, ...]
    count: int


def experts_of(graph: LogicalGraph) -> Experts:
    """The experts of a step's mixtures: their matrices, and tables of biases that are read where these are."""
    found: dict[str, int] = {}
    for call in graph.of_kind(Call):
        if call.op != EXPERT_MM:
            continue
        weight = parameter_of(graph, call.args[1])
        if weight is not None:
            found[weight.key] = weight.value.shape[0]
            found |= _tables(graph, call.args[2], weight.value.shape[0])
    return Experts(tuple(found), gcd(*found.values()) if found else 0)


def _tables(graph: LogicalGraph, ids: object, experts: int) -> Iterator[tuple[str, int]]:
    """Tables of as many rows that are read at the experts of rows."""
    readers = graph.users[ids.name] if isinstance(ids, Ref) else ()
    for node in readers:
        if isinstance(node, Call) and node.op == _INDEX:
            table = parameter_of(graph, node.args[0])
            if table is not None and table.value.shape[0] == experts:
                yield table.key, experts
