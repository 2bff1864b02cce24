"""Parameters that join several matrices, stored so that a split gives each rank its rows of each of them.

One matrix may make queries, keys and values, or a gate and what it gates. A split of its rows is no
split of the parts that its outputs are cut into, so activations would go from rank to rank. Megatron-LM
(section 3) stores such a matrix so that each rank has its rows of every part; so does this pass, in
`Shares` with as many blocks as there are ranks along the split.

Before: a graph without layouts, and hints. After: an equal graph, in which inputs say in which order
they are stored. Calls that do not care about the order stay as they are (`joined/dims.py`); those that cut
the dimension into parts, or join it, do so within each block. What other programs have stored in
shares, and this one reads in another way, is put in order first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.compiler.context import Context, Stages
from weft.compiler.graph.joined.blocks import SharedDims, with_shares
from weft.compiler.graph.joined.dims import JoinedDim, joined_dim
from weft.compiler.graph.joined.in_order import in_order
from weft.compiler.graph.joined.unfit import unfit_dims
from weft.ir.logical import Input, LogicalGraph
from weft.layout import Shares


def store_in_shares(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph with variables in shares: those for which that pays, or those that another program has so.

    Args:
        graph: without layouts.
        context: with hints and stages.
    """
    hints, stages = context.hints, context.stages
    decided = [own.shares for own in hints.values() if own.shares is not None]
    if decided:
        given = {key: shares for own in decided for key, shares in own.items()}
        return _as_given(graph, given, stages)
    return with_shares(graph, unfit_dims(graph, hints, stages))


def _as_given(graph: LogicalGraph, given: Mapping[str, Shares], stages: Stages) -> LogicalGraph:
    """The graph that reads what is stored in shares."""
    inputs = {n.value.name: n for n in graph.of_kind(Input) if n.key in given}
    found: SharedDims = []
    known: set[str] = set()
    for name, node in inputs.items():
        shares = given[node.key]
        joined = None if name in known else joined_dim(graph, name, shares.dim)
        if joined is not None and _agree(graph, joined, shares, given):
            found.append((shares, joined))
            known.update(joined.dims)
    graph = with_shares(graph, found)
    rest = {name: given[node.key] for name, node in inputs.items() if name not in known}
    return in_order(graph, rest, stages) if rest else graph


def _agree(
    graph: LogicalGraph, joined: JoinedDim, shares: Shares, given: Mapping[str, Shares]
) -> bool:
    """True where every variable that has a dimension is stored in the same shares, of the parts that are cut."""
    variables = (n for n in graph.of_kind(Input) if n.value.name in joined.dims)
    return joined.pieces <= shares.pieces and all(
        given.get(node.key) == replace(shares, dim=joined.dims[node.value.name])
        for node in variables
    )
