"""The distance of a stage's layouts from the cheapest: the least sum of calls and boxing.

Deduction solves one axis of a grid after the other, and keeps what a strategy says. Here all axes are solved at
once without hints, by the same elimination (`layouts/solver.py`): the result is a bound for all layouts, and, if tables
stay small, the layouts that reach the bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, final

import numpy as np

from weft.cached import cached_property
from weft.compiler.assignment import Assignment
from weft.compiler.hints import Hints
from weft.compiler.layouts.boxing_costs import Table
from weft.compiler.layouts.coordinate_descent import costs_of, form_of, joined_tables, options_of
from weft.compiler.layouts.options import Known, PerAxis, SignatureOptions, start
from weft.compiler.layouts.problem import FreeVariable, Problem, SharedBoxing, build
from weft.compiler.layouts.solver import Solution, minimize, total
from weft.hardware import CostModel
from weft.ir.logical import Call, Input, LogicalGraph, Output
from weft.layout import SBP, Broadcast, Layout, Placement, Split
from weft.ops import Signature

# Axes of several ranks that are solved at once at most: of three, the tables of one tensor take seconds.
MOST_AXES = 2


@final
@dataclass(frozen=True)
class LeastSum:
    """The sum of a stage's calls and boxing, beside the least.

    Attributes:
        bound: the least that any layouts cost.
        cheapest: signatures of calls, by the name of the first result, of the cheapest layouts that were found; and of
            inputs, by their keys.
        differing: the names and keys of those that are not as they are.
    """

    cost: float
    bound: float
    cheapest: Mapping[str, PerAxis] = field(repr=False)
    differing: tuple[str, ...] = field(repr=False)


@final
@dataclass(frozen=True, eq=False)
class LeastSums:
    """Least sums of stages on grids of one shape; equal calls and edges share their tables, equal stages all."""

    grid: tuple[int, ...]
    cost_model: CostModel
    # By the form of a problem and the options as they stand: the choices now, their cost, the best, what a ban costs.
    _solved: dict[object, tuple[list[int], float, Solution, float]] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def _known(self) -> Known:
        """Options and tables; ties between equal reductions are none of the sum."""
        return Known(self.grid, replace(self.cost_model, early_reduction=0.0))

    def of(
        self,
        graph: LogicalGraph,
        hints: Hints,
        placement: Placement,
        assignment: Assignment,
        held: Collection[str] = (),
    ) -> LeastSum | None:
        """The least sum of a stage; None if that cannot be said.

        The bound is unknown on grids with more axes than are solved at once, and for layouts outside the options.

        Args:
            graph, hints, placement: the stage, as it was deduced.
            assignment: its layouts.
            held: keys of inputs and names of calls of which the layout is not a choice.

        Raises:
            RuleError: when an op has no rule.
        """
        if sum(parts > 1 for parts in self.grid) > MOST_AXES:
            return None
        problem = free_problem(graph, hints, placement, held)
        axes = tuple(range(len(self.grid)))
        whole = [start(variable, len(axes)) for variable in problem.variables]
        options = options_of(problem, self._known, axes, whole)
        try:
            known = chosen_options(problem, graph, assignment, options)
        except NoOption:
            return None
        key = form_of(problem), tuple(known.items())
        if key not in self._solved:
            unary, edges = costs_of(problem, self._known, axes, options)
            unary, pairwise, never = joined_tables(unary, edges)
            here = complete_greedily(known, unary, pairwise)
            found = minimize(unary, pairwise, starts=[here])
            self._solved[key] = here, total(here, unary, pairwise), found, never
        here, cost, found, never = self._solved[key]
        if max(cost, found.cost) >= never:
            return None
        chosen = _named(graph, problem, options, found.choices)
        before = _named(graph, problem, options, here)
        differing = tuple(name for name in chosen if chosen[name] != before[name])
        return LeastSum(cost, found.bound, chosen, differing)


def _named(
    graph: LogicalGraph,
    problem: Problem,
    options: Sequence[SignatureOptions],
    choices: Sequence[int],
) -> dict[str, PerAxis]:
    signatures = [each.signatures[choice] for each, choice in zip(options, choices, strict=True)]
    found: dict[str, PerAxis] = {}
    for number, node in enumerate(graph.nodes):
        place = problem.variable_of.get(number)
        if place is None:
            continue
        if isinstance(node, Call) and node.makes:
            found[node.makes[0].name] = signatures[place]
        elif isinstance(node, Input):
            found[node.key] = signatures[place]
    return found


def free_problem(
    graph: LogicalGraph, hints: Hints, placement: Placement, held: Collection[str] = ()
) -> Problem:
    """The problem of a stage whose layouts are free.

    Shards in which parameters are stored are not layouts: they stay, and parameters are whole where they are used.
    Values from other stages may come in any layout.

    Args:
        held: keys of inputs, and names of results of hints and calls, of which the layout is not a choice.
    """
    inputs = {key: sbps for key, sbps in hints.inputs.items() if key in hints.stored or key in held}
    signatures = {name: every for name, every in hints.signatures.items() if name in held}
    # A hint that a strategy set says nothing.
    nodes = (
        node.changed(hint=replace(node.hint, sbps=(None,)))
        if isinstance(node, Call)
        and node.hint is not None
        and node.hint.stored is None
        and node.makes[0].name not in held
        else node
        for node in graph.nodes
    )
    problem = build(
        graph.with_nodes(nodes), replace(hints, inputs=inputs, signatures=signatures), placement
    )
    # What is charged beside calls and boxing is no part of the sum.
    for place, variable in enumerate(problem.variables):
        if isinstance(variable, FreeVariable):
            choices = variable.choices
            if variable.sent:
                sbps: tuple[SBP, ...] = (Broadcast(), *map(Split, range(len(variable.spec.shape))))
                choices = (tuple(Signature((sbp,), (sbp,)) for sbp in sbps),) * placement.axes
            problem.variables[place] = variable._replace(
                choices=choices, prefer_broadcast=False, sent=False, fed=False
            )
    problem.edges[:] = [
        edge._replace(intents=tuple("" if x == "stored" else x for x in edge.intents))
        if "stored" in edge.intents
        else edge
        for edge in problem.edges
    ]
    return problem


# The layouts of operands and of results; None for a result that is not a tensor.
_Ports: TypeAlias = tuple[Sequence[Layout], Sequence[Layout | None]]


@final
class NoOption(Exception):
    """A layout that stands is none of the options."""


def chosen_options(
    problem: Problem,
    graph: LogicalGraph,
    assignment: Assignment,
    options: Sequence[SignatureOptions],
) -> dict[int, int]:
    """The number of each variable's option; an assignment does not say it of what leaves for other stages.

    Raises:
        NoOption: a layout is none of the options.
    """
    node_of = {place: number for number, place in problem.variable_of.items()}
    found: dict[int, int] = {}
    for place, variable in enumerate(problem.variables):
        if isinstance(variable, SharedBoxing):
            layout = assignment.shared.get(variable.value) or assignment.values[variable.value]
            found[place] = _number(options[place], ((layout,), (layout,)))
        elif place in node_of:
            ports = _ports(graph, node_of[place], assignment)
            found[place] = _number(options[place], ports)
    return found


def complete_greedily(
    found: Mapping[int, int], unary: Sequence[Table], pairwise: Mapping[tuple[int, int], Table]
) -> list[int]:
    """Choices of all variables: those that are not known are the cheapest beside those that are."""
    around: dict[int, Table] = {
        place: own.copy() for place, own in enumerate(unary) if place not in found
    }
    for (source, target), table in pairwise.items():
        if target in around and source in found:
            around[target] += table[found[source]]
        if source in around and target in found:
            around[source] += table[:, found[target]]
    return [
        found[place] if place in found else int(np.argmin(around[place]))
        for place in range(len(unary))
    ]


def _ports(graph: LogicalGraph, number: int, assignment: Assignment) -> _Ports:
    node = graph.nodes[number]
    if isinstance(node, Input):
        layout = assignment.values[node.value.name]
        return (layout,), (layout,)
    operands = assignment.operands[number]
    if isinstance(node, Output):
        return operands, ()
    assert isinstance(node, Call)
    return operands, [assignment.values[each.name] if each else None for each in node.outputs]


def _number(options: SignatureOptions, ports: _Ports) -> int:
    operands, results = ports
    for number, every in enumerate(options.signatures):
        if all(
            _same(one.operands, operands, axis) and _same(one.results, results, axis)
            for axis, one in enumerate(every)
        ):
            return number
    raise NoOption


def _same(sbps: Iterable[object], layouts: Sequence[Layout | None], axis: int) -> bool:
    return all(
        layout is None or layout.sbp[axis] == sbp
        for sbp, layout in zip(sbps, layouts, strict=False)
    )
