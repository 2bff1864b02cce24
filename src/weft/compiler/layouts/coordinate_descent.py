"""The search for the cheapest layouts: every axis of the grid, one after the other until nothing changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from weft.compiler.layouts.boxing_costs import SBPs, Table
from weft.compiler.layouts.options import (
    Axes,
    Known,
    LayoutChoice,
    PerAxis,
    ReadCosts,
    SignatureOptions,
    start,
)
from weft.compiler.layouts.problem import OpChoice, Problem, ReadEdge, SharedBoxing
from weft.compiler.layouts.solver import minimize
from weft.errors import RuleError
from weft.layout import Broadcast

# Most rounds over all axes of a grid; two or three are usual.
ROUNDS = 4


def descend(problem: Problem, known: Known) -> LayoutChoice:
    """Choose a signature on each axis of the grid for every variable of `problem`.

    Starts with Broadcast everywhere. The current choice of an axis is always among its options.

    Raises:
        RuleError: when an op has no rule.
    """
    key = (known.number(form_of(problem)),)
    if key in known.solved:
        return known.solved[key]
    # Axes of one rank once, which cost nothing and change nothing; then axis after axis, until nothing changes.
    grid = known.grid
    choice = LayoutChoice(tuple(start(variable, len(grid)) for variable in problem.variables))
    alone = [axis for axis, parts in enumerate(grid) if parts == 1]
    several = [axis for axis, parts in enumerate(grid) if parts > 1]
    proven: dict[int, bool] = {}
    for axis in alone:
        choice = solve(problem, known, (axis,), choice)
        proven[axis] = choice.exact
    solved = 0  # axes that have been solved since something last changed
    for turn in range(ROUNDS * len(several)):
        axis, before = several[turn % len(several)], choice.signatures
        choice = solve(problem, known, (axis,), choice)
        proven[axis] = choice.exact
        solved = solved + 1 if choice.signatures == before else 1
        if solved == len(several):
            break
    exact = solved == len(several) and all(proven.values())
    known.solved[key] = replace(choice, exact=exact)
    return known.solved[key]


def choose_again(
    problem: Problem,
    known: Known,
    choice: LayoutChoice,
    free: Mapping[int, Collection[int]],
) -> LayoutChoice:
    """Choose some variables again while the others keep their signatures.

    Cost and bound stay those of `choice`: they do not include the storage.

    Args:
        free: for an axis, the variables that are chosen again along it.
    """
    form = known.number(form_of(problem))
    key = form, choice, tuple((axis, frozenset(each)) for axis, each in free.items())
    if key not in known.solved:
        settled, exact = choice, choice.exact
        for axis, variables in free.items():
            settled = solve(problem, known, (axis,), settled, variables)
            exact = exact and settled.exact
        known.solved[key] = replace(choice, signatures=settled.signatures, exact=exact)
    return known.solved[key]


def form_of(problem: Problem) -> tuple[object, ...]:
    """Everything that a solution depends on, without names: equal for equal stages."""
    variables: list[object] = []
    for variable in problem.variables:
        match variable:
            case OpChoice(call=call, thin=thin, times=times, pinned=pinned):
                variables.append((OpChoice, call, thin, times, pinned))
            case SharedBoxing(spec=spec, thin=thin):
                variables.append((SharedBoxing, spec, thin))
            case _:
                variables.append(variable)
    return tuple(variables), tuple(problem.edges)


def solve(
    problem: Problem,
    known: Known,
    axes: Axes,
    choice: LayoutChoice,
    free: Collection[int] | None = None,
) -> LayoutChoice:
    """Choose all signatures along some axes again, or only those of some variables.

    Boxing between other variables is fixed then, and not counted.
    """
    chosen = choice.signatures
    options = options_of(problem, known, axes, chosen, free)
    unary, edges = costs_of(problem, known, axes, options, free)
    unary, pairwise, never = joined_tables(unary, edges)
    pairs = list(zip(options, chosen, strict=True))
    stays = all(every in one.signatures for one, every in pairs)
    as_it_is = [one.signatures.index(every) for one, every in pairs] if stays else None
    found = minimize(unary, pairwise, starts=[as_it_is] if as_it_is else [])
    choices = found.choices
    broken = sum(
        int(costs.forbidden[choices[edge.source], choices[edge.target]])
        for edge, costs in edges
        if costs.forbidden is not None
    )
    signatures = tuple(
        [one.signatures[number] for one, number in zip(options, choices, strict=True)]
    )
    cost, bound = found.cost - broken * never, found.bound - broken * never
    return LayoutChoice(signatures, cost, bound, found.exact, broken)


def options_of(
    problem: Problem,
    known: Known,
    axes: Axes,
    chosen: Sequence[PerAxis],
    free: Collection[int] | None = None,
) -> list[SignatureOptions]:
    """The options of all variables along some axes, while the others keep the chosen signatures.

    The signatures of a Share are the layouts in which its value may be made or
    read. A Partial that only a reader uses is left out: it comes from Broadcast at no cost.

    Raises:
        RuleError: when an op has no rule.
    """
    found: list[SignatureOptions] = []
    shares: dict[int, SharedBoxing] = {}
    for number, (variable, signatures) in enumerate(zip(problem.variables, chosen, strict=True)):
        if free is not None and number not in free:
            found.append(known.as_it_is(signatures))
        elif isinstance(variable, SharedBoxing):
            shares[number] = variable
            found.append(_NONE)
        else:
            try:
                found.append(known.of(variable, axes, signatures))
            except RuleError as error:
                at = variable.node.location if isinstance(variable, OpChoice) else None
                raise RuleError(f"{at}: {error}" if at else str(error)) from error
    whole = (Broadcast(),) * len(axes)
    seen: dict[int, set[SBPs]] = {number: {whole} for number in shares}
    for edge in problem.edges:
        if edge.target in seen:
            seen[edge.target].update(found[edge.source].made_along(axes, edge.result))
        if edge.source in seen:
            seen[edge.source].update(found[edge.target].wanted_along(axes, edge.operand))
    for number, share in shares.items():
        found[number] = known.shared(share, frozenset(seen[number]), axes, chosen[number])
    return found


_NONE = SignatureOptions((), np.zeros(0))


def costs_of(
    problem: Problem,
    known: Known,
    axes: Axes,
    options: Sequence[SignatureOptions],
    free: Collection[int] | None = None,
) -> tuple[list[Table], list[tuple[ReadEdge, ReadCosts]]]:
    """The costs of all variables, and of edges: all, or those of some variables."""
    calls = [isinstance(variable, OpChoice) for variable in problem.variables]
    edges = [
        (
            edge,
            known.read(
                edge, calls[edge.target], axes, (options[edge.source], options[edge.target])
            ),
        )
        for edge in problem.edges
        if free is None or edge.source in free or edge.target in free
    ]
    return [each.costs for each in options], edges


def joined_tables(
    unary: list[Table], edges: Sequence[tuple[ReadEdge, ReadCosts]]
) -> tuple[list[Table], dict[tuple[int, int], Table], float]:
    """The tables of variables and of pairs, and the charge for forbidden choices: more than everything else together.

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
