"""Deduction: one layout for every value and operand, the cheapest in total under the user's hints.

One signature per call, one SBP per input: a sum of costs of single choices (work) and of pairs of
choices (boxing on an edge), minimised by variable elimination, not op by op. A grid of
several axes is solved axis by axis: each axis while the others stand still, again and again
until nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.compiler.assignment import Assignment
from weft.compiler.hints import Hints, check_hints
from weft.compiler.layouts.descent import descend, settle
from weft.compiler.layouts.intent import as_whole, storage
from weft.compiler.layouts.known import Known, LayoutChoice
from weft.compiler.layouts.problem import Problem, build
from weft.hardware import CostModel
from weft.ir.logical import Call, LogicalGraph, Node, Output, Update, node_uses
from weft.layout import Layout, Placement, broadcast_layout


def deduce(
    graph: LogicalGraph,
    hints: Hints,
    placement: Placement,
    cost_model: CostModel = CostModel(),  # noqa: B008 (frozen)
    known: Known | None = None,
) -> Assignment:
    """Choose the layouts of all values and operands of `graph` on `placement`.

    Hints are fixed points. Free inputs: parameters and buffers are Broadcast or split on any
    dimension (Broadcast when that is as cheap), batch leaves Broadcast or split on their first,
    constants Broadcast; an optimizer's state follows its parameter. An update runs in the layout of
    its target; outputs are Broadcast. What is stored in shards is deduced as if it were whole, and
    stored then (`deduce_stored`).

    Args:
        graph: the step, or one stage of it.
        hints: what the user fixed.
        placement: where it runs.
        cost_model: what is minimised.
        known: what other deductions on grids of this shape, with this cost model, remember.

    Raises:
        LayoutError: when a hint cannot hold.
        RuleError: when an op has no rule.
    """
    check_hints(graph, hints, placement)
    known = known or Known(placement.shape, cost_model)
    problem = build(*as_whole(graph, hints), placement)
    choice = descend(problem, known)
    if hints.stored:
        problem = build(graph, hints, placement)
        axes = sorted(set(hints.stored.values()))
        free = {axis: problem.of(storage(graph, hints.stored, axis)) for axis in axes}
        choice = settle(problem, known, choice, free)
    return _assignment(graph, placement, problem, choice)


def _assignment(
    graph: LogicalGraph, placement: Placement, problem: Problem, choice: LayoutChoice
) -> Assignment:
    def result(variable: int, slot: int) -> Layout:
        every = choice.signatures[variable]
        return Layout(placement, tuple(signature.results[slot] for signature in every))

    def operands(variable: int) -> tuple[Layout, ...]:
        every = choice.signatures[variable]
        by_operand = zip(*(signature.operands for signature in every), strict=True)
        return tuple(Layout(placement, sbps) for sbps in by_operand)

    def wanted(number: int, node: Node) -> tuple[Layout, ...]:
        if isinstance(node, Update):
            return tuple(_wanted(node, name, values) for name in dict.fromkeys(node_uses(node)))
        return operands(problem.variable_of[number])

    values = {name: result(*made) for name, made in problem.maker_of.items()}
    readers = {
        number: wanted(number, node)
        for number, node in enumerate(graph.nodes)
        if isinstance(node, Call | Update | Output)
    }
    shared = {name: result(share, 0) for name, share in problem.share_of.items()}
    differing = {name: layout for name, layout in shared.items() if layout != values[name]}
    return Assignment(
        values, readers, differing, choice.cost, choice.bound, choice.exact, choice.broken
    )


def _wanted(update: Update, name: str, values: Mapping[str, Layout]) -> Layout:
    """The layout in which an update reads `name`: its source as its target lies, states as they are, numbers whole."""
    target = values[update.target.name]
    if update.skip is not None and name == update.skip.name:
        return broadcast_layout(target.placement)
    return values[name] if name in {ref.name for ref in update.states} else target
