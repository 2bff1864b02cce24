"""The distance of a stage's layouts from those whose calls and boxing sum to the least.

Deduction solves one axis of a grid after the other, and keeps what a strategy says. Here all axes are solved at once
and nothing is said, with elimination as there (`layouts/solver.py`): what comes out is a bound for all layouts, and,
where tables stay small, the layouts that meet it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from weft.compiler.assignment import Assignment
from weft.compiler.hints import Hints
from weft.compiler.layouts.descent import form_of
from weft.compiler.layouts.joint.freed import freed
from weft.compiler.layouts.joint.options import JointOptions, JointSignatures
from weft.compiler.layouts.joint.standing import NoOption, standing, with_rest
from weft.compiler.layouts.joint.tables import JointTables
from weft.compiler.layouts.options import PerAxis
from weft.compiler.layouts.problem import Problem
from weft.compiler.layouts.solver import Solution, minimize, total
from weft.hardware import CostModel
from weft.ir.logical import Call, Input, LogicalGraph
from weft.layout import Placement

# Axes of several ranks that are solved at once at most: of three, the tables of one tensor take seconds.
MOST_AXES = 2


@final
@dataclass(frozen=True)
class LeastSum:
    """The sum of a stage's calls and boxing, beside the least.

    Attributes:
        cost: of the layouts as they are, in the cost model's bytes.
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
class _Solved(NamedTuple):
    """Choices as they are, their cost, the best, and what is charged for what is forbidden."""

    here: Sequence[int]
    cost: float
    found: Solution
    never: float


@final
@dataclass(frozen=True)
class LeastSums:
    """Least sums of stages on grids of one shape; equal calls and edges share their tables, equal stages all.

    Attributes:
        grid: the number of ranks along each axis.
        cost_model: what is summed.
    """

    grid: tuple[int, ...]
    cost_model: CostModel
    _signatures: JointSignatures = field(init=False, repr=False)
    _tables: JointTables = field(init=False, repr=False)
    _solved: dict[object, _Solved] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_signatures", JointSignatures(self.grid, self.cost_model))
        object.__setattr__(self, "_tables", JointTables(self.grid, self.cost_model))

    def of(
        self,
        graph: LogicalGraph,
        hints: Hints,
        placement: Placement,
        assignment: Assignment,
        held: Collection[str] = (),
    ) -> LeastSum | None:
        """The least sum of a stage; None where that cannot be said.

        That is on grids of more axes than are solved at once, and where the layouts are none of the options.

        Args:
            graph, hints, placement: the stage, as it was deduced.
            assignment: its layouts.
            held: keys of inputs and names of calls of which the layout is no choice.

        Raises:
            RuleError: when an op has no rule.
        """
        if sum(parts > 1 for parts in self.grid) > MOST_AXES:
            return None
        problem = freed(graph, hints, placement, held)
        options = self._signatures.of(problem)
        try:
            known = standing(problem, graph, assignment, options)
        except NoOption:
            return None
        key = form_of(problem), tuple(known.items())
        if key not in self._solved:
            self._solved[key] = self._solve(problem, options, known)
        here, cost, found, never = self._solved[key]
        if max(cost, found.cost) >= never:
            return None
        chosen = _named(graph, problem, options, found.choices)
        before = _named(graph, problem, options, here)
        differing = tuple(name for name in chosen if chosen[name] != before[name])
        return LeastSum(cost, found.bound, chosen, differing)

    def _solve(
        self, problem: Problem, options: Sequence[JointOptions], known: Mapping[int, int]
    ) -> _Solved:
        unary, pairwise, never = self._tables.of(problem, options)
        here = with_rest(known, unary, pairwise)
        return _Solved(
            here, total(here, unary, pairwise), minimize(unary, pairwise, starts=[here]), never
        )


def _named(
    graph: LogicalGraph,
    problem: Problem,
    options: Sequence[JointOptions],
    choices: Sequence[int],
) -> dict[str, PerAxis]:
    """Signatures by the names of calls and the keys of inputs."""
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
