"""The families of parameters that a strategy splits: vocabularies, experts, other layers."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.logical import Input, LogicalGraph
from weft.layout import Split
from weft.patterns import first_match
from weft.search.steps.experts import experts_of
from weft.search.steps.vocabularies import vocabularies
from weft.strategy.strategy import Strategy
from weft.strategy.text import sbps_of


def split_parameters(graph: LogicalGraph, strategy: Strategy) -> frozenset[tuple[str, int]]:
    """The families of parameters that a strategy splits by name, and the dimensions; () where all are whole.

    Of layers that are neither vocabularies nor experts the dimension is no matter: 0.
    """
    named = dict.fromkeys(experts_of(graph).parameters, "experts")
    named |= dict.fromkeys(vocabularies(graph), "vocabularies")
    return frozenset(_families(graph, strategy, named))


def _families(
    graph: LogicalGraph, strategy: Strategy, named: dict[str, str]
) -> Iterator[tuple[str, int]]:
    for node in graph.of_kind(Input):
        pattern = first_match(strategy.parameters, node.key) if node.role == "parameter" else None
        for sbp in () if pattern is None else sbps_of(strategy.parameters[pattern]):
            if isinstance(sbp, Split):
                family = named.get(node.key)
                yield ("layers", 0) if family is None else (family, sbp.dim)
