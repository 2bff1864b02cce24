"""A stage as it is where nothing is said of layouts: all a strategy may choose is left free."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from weft.compiler.hints import Hints, is_hint
from weft.compiler.layouts.problem import Given, Problem, build
from weft.ir.arguments import changed
from weft.ir.logical import Call, Input, LogicalGraph, Node
from weft.layout import SBP, Broadcast, Placement, Split
from weft.ops import Signature


def freed(
    graph: LogicalGraph, hints: Hints, placement: Placement, held: Collection[str] = ()
) -> Problem:
    """The problem of a stage whose layouts are free.

    Shards in which parameters are stored are no layouts: they stay, and parameters are whole where they are used. What
    comes from other stages may come in any layout.

    Args:
        graph: the stage, without layouts.
        hints: of it.
        placement: where it runs.
        held: keys of inputs, and names of results of hints and calls, of which the layout is no choice.
    """
    inputs = {key: sbps for key, sbps in hints.inputs.items() if key in hints.stored or key in held}
    signatures = {name: every for name, every in hints.signatures.items() if name in held}
    nodes = (_freed(node, held) for node in graph.nodes)
    problem = build(
        graph.with_nodes(nodes), replace(hints, inputs=inputs, signatures=signatures), placement
    )
    for number, node in enumerate(graph.nodes):
        if isinstance(node, Input) and node.sent is not None:
            place = problem.variable_of[number]
            given = problem.variables[place]
            assert isinstance(given, Given)
            choices = (_any_way(len(given.spec.shape)),) * placement.axes
            problem.variables[place] = replace(given, choices=choices)
    return problem


def _freed(node: Node, held: Collection[str]) -> Node:
    """A hint that a strategy set, as one that says nothing."""
    if not isinstance(node, Call) or not is_hint(node) or node.hint is None:
        return node
    if node.hint.stored is not None or node.makes[0].name in held:
        return node
    return changed(node, hint=replace(node.hint, sbps=(None,)))


def _any_way(dims: int) -> tuple[Signature, ...]:
    sbps: tuple[SBP, ...] = (Broadcast(), *map(Split, range(dims)))
    return tuple(Signature((sbp,), (sbp,)) for sbp in sbps)
