"""The search for the cheapest layouts: every axis of the grid exactly, one after the other until nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.compiler.deduce_boxing import BoxingCosts, Table, idle_bytes, reductions
from weft.compiler.deduce_intent import Intent, departures
from weft.compiler.deduce_options import GivenOptions, Options, PerAxis, WorkOptions, start
from weft.compiler.deduce_problem import Edge, Problem, Share, Work
from weft.compiler.solver import minimize
from weft.errors import RuleError
from weft.hardware import CostModel
from weft.layout import SBP, Broadcast, Partial

# Most rounds over all axes of a grid; two or three are usual.
ROUNDS = 4


@dataclass(frozen=True)
class Choice:
    """What was chosen: for each variable, its signature on each axis.

    `cost` is the cost of all work and boxing, in bytes, with the charges along the last axis;
    `exact` says whether it is the least along each axis with the others as they are.
    """

    signatures: tuple[PerAxis, ...]
    cost: float
    exact: bool


def descend(problem: Problem, grid: tuple[int, ...], cost_model: CostModel) -> Choice:
    """Choose a signature on each axis of `grid` for every variable of `problem`.

    Starts with Broadcast everywhere. What an axis has is always among its options.

    Raises:
        RuleError: when an op has no rule.
    """
    descent = _Descent(problem, grid, cost_model)
    chosen = [start(variable, len(grid)) for variable in problem.variables]
    cost, exact = 0.0, True
    for _ in range(ROUNDS if len(grid) > 1 else 1):
        before = list(chosen)
        for axis in range(len(grid)):
            cost, proven = descent.solve(axis, chosen)
            exact = exact and proven
        if chosen == before:
            break
    return Choice(tuple(chosen), cost, exact)


@dataclass
class _Descent:
    """What the steps of one descent remember: options by op call and axis, tables by tensor and options."""

    problem: Problem
    grid: tuple[int, ...]
    cost_model: CostModel
    tables: dict[tuple[object, ...], Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work = WorkOptions(self.grid, self.cost_model)
        self.given = GivenOptions(self.grid, self.cost_model)
        self.boxing = BoxingCosts(self.grid, self.cost_model)

    def solve(self, axis: int, chosen: list[PerAxis]) -> tuple[float, bool]:
        """Choose all signatures along `axis` anew, in place; cost and whether it is proven least."""
        options = self._options(axis, chosen)
        unary = [
            one.costs * variable.times
            if isinstance(variable, Work) and variable.times > 1
            else one.costs
            for variable, one in zip(self.problem.variables, options, strict=True)
        ]
        pairwise: dict[tuple[int, int], Table] = {}
        for edge in self.problem.edges:
            ends = (edge.source, edge.target)
            table = self._table(edge, axis, chosen, options)
            table = table if edge.times == 1 else table * edge.times
            if edge.source == edge.target:
                unary[edge.source] = unary[edge.source] + np.diagonal(table)
            else:
                pairwise[ends] = pairwise[ends] + table if ends in pairwise else table
        choices, cost, exact = minimize(unary, pairwise)
        for variable, choice in enumerate(choices):
            every, signature = chosen[variable], options[variable].signatures[choice]
            chosen[variable] = (*every[:axis], signature, *every[axis + 1 :])
        return cost, exact

    def _options(self, axis: int, chosen: Sequence[PerAxis]) -> list[Options]:
        """The options of all variables; those of a Share follow from what it connects."""
        variables = self.problem.variables
        found: list[Options] = []
        for variable, signatures in zip(variables, chosen, strict=True):
            if isinstance(variable, Work):
                found.append(self._work(variable, axis, signatures))
            elif isinstance(variable, Share):
                found.append(Options((), np.zeros(0)))
            else:
                found.append(self.given.of(variable, axis, signatures))
        seen = self._seen(found)
        for number, variable in enumerate(variables):
            if isinstance(variable, Share):
                sbps = frozenset(seen[number])
                found[number] = self.given.shared(variable, sbps, axis, chosen[number])
        return found

    def _work(self, work: Work, axis: int, signatures: PerAxis) -> Options:
        try:
            return self.work.of(work, axis, signatures)
        except RuleError as error:
            raise RuleError(f"{work.node.op} at {work.node.location}: {error}") from error

    def _seen(self, options: Sequence[Options]) -> dict[int, set[SBP]]:
        """For each Share: the SBPs that its value may be made in or wanted in.

        Never a Partial that only a reader wants: it comes from Broadcast at no cost, and the other
            readers want that.
        """
        variables = self.problem.variables
        seen: dict[int, set[SBP]] = {
            number: {Broadcast()}
            for number, variable in enumerate(variables)
            if isinstance(variable, Share)
        }
        for edge in self.problem.edges:
            if edge.target in seen:
                made = options[edge.source].signatures
                seen[edge.target].update(one.results[edge.result] for one in made)
            if edge.source in seen:
                wanted = (one.operands[edge.operand] for one in options[edge.target].signatures)
                seen[edge.source].update(w for w in wanted if not isinstance(w, Partial))
        return seen

    def _table(
        self, edge: Edge, axis: int, chosen: Sequence[PerAxis], options: Sequence[Options]
    ) -> Table:
        """Cost of boxing on an edge for each option of its source and each of its target."""
        others = [other for other in range(len(self.grid)) if other != axis]
        before = tuple(chosen[edge.source][other].results[edge.result] for other in others)
        after = tuple(chosen[edge.target][other].operands[edge.operand] for other in others)
        source, target = options[edge.source], options[edge.target]
        ports = (id(source), edge.result, id(target), edge.operand)
        intent: Intent = edge.intents[axis] if edge.intents else ""
        early = isinstance(self.problem.variables[edge.target], Work)
        key = (edge.spec, axis, before, after, ports, intent, early)
        if key not in self.tables:
            made = tuple(one.results[edge.result] for one in source.signatures)
            wanted = tuple(one.operands[edge.operand] for one in target.signatures)
            table = self.boxing.table(edge.spec, axis, (before, after), (made, wanted))
            if early:
                table = table + self.cost_model.early_reduction * reductions(made, wanted)
            if intent:
                idle = idle_bytes(edge.spec, axis, before, self.grid)
                table = table + idle * departures(intent, made, wanted, self.cost_model)
            self.tables[key] = table
        return self.tables[key]
