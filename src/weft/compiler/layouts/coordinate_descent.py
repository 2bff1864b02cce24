"""The search for the cheapest layouts: every axis of the grid, one after the other until nothing changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from weft.cached import cached_property
from weft.compiler.layouts.boxing_costs import Table, idle_bytes, reductions
from weft.compiler.layouts.intent import Intent, charges, forbidden
from weft.compiler.layouts.options import (
    Known,
    LayoutChoice,
    PerAxis,
    ReadCosts,
    SignatureOptions,
    start,
)
from weft.compiler.layouts.problem import OpChoice, Problem, ReadEdge, Share
from weft.compiler.layouts.solver import minimize
from weft.errors import RuleError
from weft.layout import SBP, Broadcast

# Most rounds over all axes of a grid; two or three are usual.
ROUNDS = 4


def descend(problem: Problem, known: Known) -> LayoutChoice:
    """Choose a signature on each axis of the grid for every variable of `problem`.

    Starts with Broadcast everywhere. What an axis has is always among its options.

    Raises:
        RuleError: when an op has no rule.
    """
    key = (known.number(form_of(problem)),)
    found = known.solved.get(key)
    if found is None:
        found = known.solved[key] = _descend(problem, known)
    return found


def _descend(problem: Problem, known: Known) -> LayoutChoice:
    """Axes of one rank once, which cost nothing and change nothing; then axis after axis, until nothing changes."""
    descent, grid = _Descent(problem, known), known.grid
    choice = LayoutChoice(tuple(start(variable, len(grid)) for variable in problem.variables))
    alone = [axis for axis, parts in enumerate(grid) if parts == 1]
    several = [axis for axis, parts in enumerate(grid) if parts > 1]
    proven: dict[int, bool] = {}
    for axis in alone:
        choice = descent.solve(axis, choice)
        proven[axis] = choice.exact
    solved = 0  # axes that have been solved since something last changed
    for turn in range(ROUNDS * len(several)):
        axis, before = several[turn % len(several)], choice.signatures
        choice = descent.solve(axis, choice)
        proven[axis] = choice.exact
        solved = solved + 1 if choice.signatures == before else 1
        if solved == len(several):
            break
    return replace(choice, exact=solved == len(several) and all(proven.values()))


def settle(
    problem: Problem,
    known: Known,
    choice: LayoutChoice,
    free: Mapping[int, Collection[int]],
) -> LayoutChoice:
    """Choose some variables anew while the others keep what they have.

    Cost and bound stay those of `choice`: what is stored otherwise is no part of them.

    Args:
        free: for an axis, the variables that are chosen anew along it.
    """
    form = known.number(form_of(problem))
    key = form, choice, tuple((axis, frozenset(each)) for axis, each in free.items())
    found = known.solved.get(key)
    if found is None:
        found = known.solved[key] = _settle(problem, known, choice, free)
    return found


def _settle(
    problem: Problem, known: Known, choice: LayoutChoice, free: Mapping[int, Collection[int]]
) -> LayoutChoice:
    descent, settled, exact = _Descent(problem, known), choice, choice.exact
    for axis, variables in free.items():
        settled = descent.solve(axis, settled, variables)
        exact = exact and settled.exact
    return replace(choice, signatures=settled.signatures, exact=exact)


def form_of(problem: Problem) -> tuple[object, ...]:
    """All that a solution depends on, without names: what is equal for equal stages."""
    variables: list[object] = []
    for variable in problem.variables:
        match variable:
            case OpChoice(call=call, thin=thin, times=times, pinned=pinned):
                variables.append((OpChoice, call, thin, times, pinned))
            case Share(spec=spec, thin=thin):
                variables.append((Share, spec, thin))
            case _:
                variables.append(variable)
    return tuple(variables), tuple(problem.edges)


@final
@dataclass(frozen=True)
class _Descent:
    problem: Problem
    known: Known

    @cached_property
    def specs(self) -> list[int]:
        """The numbers of the edges' tensors."""
        return [self.known.number(edge.spec) for edge in self.problem.edges]

    def solve(
        self, axis: int, choice: LayoutChoice, free: Collection[int] | None = None
    ) -> LayoutChoice:
        """Choose all signatures along `axis` anew, or only those of some variables.

        Boxing between others is no choice then, and not counted.
        """
        chosen = choice.signatures
        options = self._options(axis, chosen, free)
        others = [other for other in range(len(self.known.grid)) if other != axis]
        standing = [tuple([every[other] for other in others]) for every in chosen]
        numbers = list(map(self.known.number, standing))
        unary = [
            self.known.times(one, variable.times) if isinstance(variable, OpChoice) else one.costs
            for variable, one in zip(self.problem.variables, options, strict=True)
        ]
        edges = [
            (
                edge,
                self._costs(
                    edge,
                    (spec, numbers[edge.source], numbers[edge.target]),
                    axis,
                    standing,
                    options,
                ),
            )
            for edge, spec in zip(self.problem.edges, self.specs, strict=True)
            if free is None or edge.source in free or edge.target in free
        ]
        unary, pairwise, never = joined(unary, edges)
        found = minimize(unary, pairwise, starts=_present(options, axis, chosen))
        broken = sum(_breaks(edge, costs, found.choices) for edge, costs in edges)
        signatures = tuple(
            (*every[:axis], one.signatures[number], *every[axis + 1 :])
            for every, one, number in zip(chosen, options, found.choices, strict=True)
        )
        cost, bound = found.cost - broken * never, found.bound - broken * never
        return LayoutChoice(signatures, cost, bound, found.exact, broken)

    def _options(
        self, axis: int, chosen: Sequence[PerAxis], free: Collection[int] | None
    ) -> list[SignatureOptions]:
        """The options of all variables; those of a Share follow from what it connects."""
        variables = self.problem.variables
        found: list[SignatureOptions] = []
        for number, (variable, signatures) in enumerate(zip(variables, chosen, strict=True)):
            if free is not None and number not in free:
                found.append(self.known.as_it_is(signatures[axis]))
            elif isinstance(variable, OpChoice):
                found.append(self._work(variable, axis, signatures))
            elif isinstance(variable, Share):
                found.append(SignatureOptions((), np.zeros(0)))
            else:
                found.append(self.known.given.of(variable, axis, signatures))
        seen = self._seen(found)
        for number, variable in enumerate(variables):
            if isinstance(variable, Share) and not found[number].signatures:
                sbps = frozenset(seen[number])
                found[number] = self.known.given.shared(variable, sbps, axis, chosen[number])
        return found

    def _work(self, work: OpChoice, axis: int, signatures: PerAxis) -> SignatureOptions:
        try:
            return self.known.work.of(work, axis, signatures)
        except RuleError as error:
            place = f"{work.node.location}: " if work.node.location else ""
            raise RuleError(f"{place}{error}") from error

    def _seen(self, options: Sequence[SignatureOptions]) -> dict[int, set[SBP]]:
        """For each Share: the SBPs that its value may be made in or wanted in.

        A Partial that only a reader wants is left out: it comes from Broadcast at no cost, and the other
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
                seen[edge.target].update(options[edge.source].made(edge.result))
            if edge.source in seen:
                seen[edge.source].update(options[edge.target].wanted(edge.operand))
        return seen

    def _costs(
        self,
        edge: ReadEdge,
        numbers: tuple[int, int, int],
        axis: int,
        standing: Sequence[PerAxis],
        options: Sequence[SignatureOptions],
    ) -> ReadCosts:
        """Cost of boxing on an edge for each option of its source and each of its target.

        `standing` are the signatures of the other axes, which stand still; `numbers` those of the
        tensor and of what stands still on both sides.
        """
        source, target = options[edge.source], options[edge.target]
        ports = id(source), edge.result, id(target), edge.operand
        intent: Intent = edge.intents[axis] if edge.intents else ""
        early = isinstance(self.problem.variables[edge.target], OpChoice)
        key = (*numbers, axis, *ports, intent, early, edge.times)
        found = self.known.tables.get(key)
        if found is None:
            here, there = standing[edge.source], standing[edge.target]
            before = tuple(one.results[edge.result] for one in here)
            after = tuple(one.operands[edge.operand] for one in there)
            made = tuple(one.results[edge.result] for one in source.signatures)
            wanted = tuple(one.operands[edge.operand] for one in target.signatures)
            table = self.known.boxing.table(edge.spec, axis, (before, after), (made, wanted))
            if early:
                table = table + self.known.cost_model.early_reduction * reductions(made, wanted)
            if intent:
                idle = idle_bytes(edge.spec, axis, before, self.known.grid)
                table = table + idle * charges(intent, made, wanted, self.known.cost_model)
            ban = forbidden(intent, made, wanted, self.known.cost_model)
            found = self.known.tables[key] = ReadCosts(table * edge.times, ban)
        return found


def joined(
    unary: list[Table], edges: Sequence[tuple[ReadEdge, ReadCosts]]
) -> tuple[list[Table], dict[tuple[int, int], Table], float]:
    """The tables of variables and of pairs, and what is charged for what is forbidden: more than all else together.

    Equal edges share a table.
    """
    most = {id(table): float(table.max()) for table in {id(each): each for each in unary}.values()}
    highest = sum(most[id(table)] for table in unary)
    never = 1.0 + 2.0 * (highest + sum(costs.highest for _, costs in edges))
    tables = {
        costs: costs.boxing if costs.forbidden is None else costs.boxing + never * costs.forbidden
        for _, costs in edges
    }
    pairwise: dict[tuple[int, int], Table] = {}
    for edge, costs in edges:
        ends, table = (edge.source, edge.target), tables[costs]
        if edge.source == edge.target:
            unary[edge.source] = unary[edge.source] + np.diagonal(table)
        else:
            pairwise[ends] = pairwise[ends] + table if ends in pairwise else table
    return unary, pairwise, never


def _breaks(edge: ReadEdge, costs: ReadCosts, choices: Sequence[int]) -> int:
    if costs.forbidden is None:
        return 0
    return int(costs.forbidden[choices[edge.source], choices[edge.target]])


def _present(
    options: Sequence[SignatureOptions], axis: int, chosen: Sequence[PerAxis]
) -> Iterator[list[int]]:
    """The choices as they stand, where all are still among the options."""
    pairs = list(zip(options, chosen, strict=True))
    if all(every[axis] in one.signatures for one, every in pairs):
        yield [one.signatures.index(every[axis]) for one, every in pairs]
