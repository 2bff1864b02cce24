"""Exact minimisation of a sum of unary and pairwise cost tables by variable elimination.

Each variable picks one of finitely many choices. A variable is eliminated by adding up all tables
that mention it and keeping, for every combination of its neighbours' choices, its best one. On
graphs that are long and thin, as training graphs are, the tables stay small and the time is linear
in the number of variables.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Table: TypeAlias = npt.NDArray[np.float64]

# Entries of the largest table that elimination may build.
TABLE_LIMIT = 2_000_000
# Rounds of local improvement after choices were fixed by the heuristic.
IMPROVEMENT_ROUNDS = 50


class Solution(NamedTuple):
    """The choice of each variable, their total cost, and whether no other choices can cost less."""

    choices: tuple[int, ...]
    cost: float
    exact: bool


class _Factor(NamedTuple):
    """A cost table over some variables: `table.ndim == len(variables)`."""

    variables: tuple[int, ...]
    table: Table


class _Eliminated(NamedTuple):
    """How to choose `variable` once `others` are chosen."""

    variable: int
    others: tuple[int, ...]
    best: npt.NDArray[Any]


def minimize(
    unary: Sequence[Table],
    pairwise: Mapping[tuple[int, int], Table],
    limit: int = TABLE_LIMIT,
) -> Solution:
    """Choose one entry of every variable so that the sum of all tables is least.

    Variables are eliminated in the order of the smallest table that each would build. Where even
    the smallest would exceed `limit` entries, the variable with the most neighbours is fixed to the
    choice that looks best from its own tables, and elimination goes on with the rest; at the end
    single choices are improved while that helps. The
    result is then good but not proven least: `exact` is False.

    Args:
        unary: for each variable, the cost of each of its choices (at least one).
        pairwise: for two different variables (i, j), the costs of their choices, of shape
            (choices of i, choices of j). (i, j) and (j, i) may both be there and add up.
        limit: entries of the largest table to build.

    Returns:
        The solution; among equals always the same one.
    """
    elimination = _Elimination(unary, pairwise, limit)
    choices = elimination.run()
    if not elimination.exact:
        _improve(choices, unary, pairwise)
    return Solution(tuple(choices), _total(choices, unary, pairwise), elimination.exact)


@dataclass
class _Elimination:
    """The state of one elimination.

    Attributes:
        factors: live tables by number; every variable in them is still open.
        factors_of: numbers of the live tables that mention each variable.
        neighbours: open variables that share a table with each open variable.
        order: what was eliminated, in order.
    """

    unary: Sequence[Table]
    pairwise: Mapping[tuple[int, int], Table]
    limit: int
    exact: bool = True
    added: int = 0
    factors: dict[int, _Factor] = field(default_factory=dict)
    factors_of: list[set[int]] = field(default_factory=list)
    neighbours: list[set[int]] = field(default_factory=list)
    order: list[_Eliminated] = field(default_factory=list)

    def run(self) -> list[int]:
        self.factors_of = [set() for _ in self.unary]
        self.neighbours = [set() for _ in self.unary]
        for variable, table in enumerate(self.unary):
            self._add(_Factor((variable,), np.asarray(table, dtype=np.float64)))
        for variables, table in self.pairwise.items():
            self._add(_Factor(variables, np.asarray(table, dtype=np.float64)))
        self._eliminate_all()
        return self._chosen()

    def _eliminate_all(self) -> None:
        """Eliminate the variable with the smallest table next, until none is open."""
        is_open = set(range(len(self.unary)))
        heap = [(self._size(variable), variable) for variable in is_open]
        heapq.heapify(heap)
        while is_open:
            size, variable = heapq.heappop(heap)
            if variable not in is_open or size != self._size(variable):
                continue  # stale: an entry with the present size is in the heap too
            chosen = variable if size <= self.limit else self._hub(is_open)
            if chosen != variable:
                heapq.heappush(heap, (size, variable))
            touched = self.neighbours[chosen]
            self._eliminate(chosen) if size <= self.limit else self._fix(chosen)
            is_open.discard(chosen)
            for other in touched:
                heapq.heappush(heap, (self._size(other), other))

    def _size(self, variable: int) -> int:
        """Entries of the table that eliminating `variable` builds."""
        around = math.prod(len(self.unary[other]) for other in self.neighbours[variable])
        return around * len(self.unary[variable])

    def _hub(self, is_open: set[int]) -> int:
        """The open variable with the most neighbours."""
        return max(is_open, key=lambda variable: (len(self.neighbours[variable]), -variable))

    def _eliminate(self, variable: int) -> None:
        """Replace all tables that mention `variable` by one that holds its best choice."""
        factors = self._take(variable)
        others = tuple(sorted({v for factor in factors for v in factor.variables} - {variable}))
        table = _summed(factors, (*others, variable))
        best = np.argmin(table, axis=-1)
        kind = np.min_scalar_type(table.shape[-1])
        self.order.append(_Eliminated(variable, others, best.astype(kind)))
        if others:
            self._add(_Factor(others, table.min(axis=-1)))

    def _fix(self, variable: int) -> None:
        """Choose for `variable` what is least when every neighbour does its best for each table alone."""
        self.exact = False
        factors = self._take(variable)
        looks = sum(_least_over_others(factor, variable) for factor in factors)
        choice = np.asarray(np.argmin(looks))
        self.order.append(_Eliminated(variable, (), choice))
        for factor in factors:
            axis = factor.variables.index(variable)
            rest = factor.variables[:axis] + factor.variables[axis + 1 :]
            if rest:
                self._add(_Factor(rest, np.asarray(factor.table.take(int(choice), axis=axis))))

    def _add(self, factor: _Factor) -> None:
        factor = self._narrowed(factor)
        number = self.added
        self.added += 1
        self.factors[number] = factor
        for variable in factor.variables:
            self.factors_of[variable].add(number)
            self.neighbours[variable].update(v for v in factor.variables if v != variable)

    def _narrowed(self, factor: _Factor) -> _Factor:
        """The factor without variables that have one choice: numpy's tables have at most 64 dimensions."""
        kept = tuple(v for v in factor.variables if len(self.unary[v]) > 1)
        return _Factor(kept, factor.table.reshape([len(self.unary[v]) for v in kept]))

    def _take(self, variable: int) -> list[_Factor]:
        """Remove and return all tables that mention `variable`, oldest first."""
        factors = []
        for number in sorted(self.factors_of[variable]):
            factor = self.factors.pop(number)
            factors.append(factor)
            for other in factor.variables:
                if other != variable:
                    self.factors_of[other].discard(number)
        for other in self.neighbours[variable]:
            self.neighbours[other].discard(variable)
        return factors

    def _chosen(self) -> list[int]:
        """The choices, last eliminated first: by then the neighbours of each variable are known."""
        choices = [0] * len(self.unary)
        for variable, others, best in reversed(self.order):
            choices[variable] = int(best[tuple(choices[other] for other in others)])
        return choices


def _summed(factors: Sequence[_Factor], variables: tuple[int, ...]) -> Table:
    """The sum of tables as one table over `variables`."""
    total: Table = np.zeros((1,) * len(variables))
    for factor in factors:
        places = [variables.index(v) for v in factor.variables]
        shape = [1] * len(variables)
        for place, size in zip(places, factor.table.shape, strict=True):
            shape[place] = size
        total = total + factor.table.transpose(np.argsort(places)).reshape(shape)
    return total


def _least_over_others(factor: _Factor, variable: int) -> Table:
    axis = factor.variables.index(variable)
    others = tuple(i for i in range(factor.table.ndim) if i != axis)
    least: Table = factor.table.min(axis=others) if others else factor.table
    return least


def _improve(
    choices: list[int], unary: Sequence[Table], pairwise: Mapping[tuple[int, int], Table]
) -> None:
    """Change single choices, in place, as long as the total falls."""
    around: list[list[tuple[int, Table]]] = [[] for _ in unary]
    for (i, j), table in pairwise.items():
        around[i].append((j, table))
        around[j].append((i, table.T))
    for _ in range(IMPROVEMENT_ROUNDS):
        before = list(choices)
        for variable, own in enumerate(unary):
            costs = own + sum(table[:, choices[other]] for other, table in around[variable])
            if costs.min() < costs[choices[variable]]:
                choices[variable] = int(np.argmin(costs))
        if choices == before:
            return


def _total(
    choices: Sequence[int], unary: Sequence[Table], pairwise: Mapping[tuple[int, int], Table]
) -> float:
    own = sum(float(table[choice]) for table, choice in zip(unary, choices, strict=True))
    return own + sum(float(table[choices[i], choices[j]]) for (i, j), table in pairwise.items())
