"""Minimisation of a sum of unary and pairwise cost tables by variable elimination, exact where tables stay small.

Each variable picks one of finitely many choices. Choices that another one dominates are left out
first (`layouts/dominated.py`). A variable is then eliminated by adding up all tables that mention it and
keeping, for every combination of its neighbours' choices, its best one. On graphs that are long and
thin, as training graphs are, the tables stay small and the time is linear in the number of
variables.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from weft.compiler.layouts.dominated import Choices, Table, without_dominated

_T = TypeVar("_T")

# Entries of the largest table that elimination may build.
TABLE_LIMIT = 2_000_000
# Rounds of local improvement of a solution that is not proven.
IMPROVEMENT_ROUNDS = 50
# A cost this close to its bound is equal to it: sums of floats in different orders differ.
_TOLERANCE = 1e-12


@final
class Solution(NamedTuple):
    """The choice of each variable, their total cost, and the least that any choices could cost."""

    choices: tuple[int, ...]
    cost: float
    bound: float

    @property
    def exact(self) -> bool:
        """True if the cost is proven least."""
        return self.cost <= self.bound + _TOLERANCE * abs(self.cost)


@final
class _Factor(NamedTuple):
    variables: tuple[int, ...]
    table: Table


@final
class _Eliminated(NamedTuple):
    """A variable with the tables that say which choice is best once all others of them are made."""

    variable: int
    factors: tuple[_Factor, ...]


def minimize(
    unary: Sequence[Table],
    pairwise: Mapping[tuple[int, int], Table],
    limit: int = TABLE_LIMIT,
    starts: Iterable[Sequence[int]] = (),
) -> Solution:
    """Choose one entry of every variable so that the sum of all tables is least.

    Variables are eliminated in the order of the smallest table that each would build. If even the smallest would
    exceed `limit` entries, its tables are taken in several groups, each minimised for itself (mini-buckets, Dechter
    and Rish 2003): what comes out is a lower bound, and choices that are good but not proven. These and `starts` are
    then improved by single changes, and the cheapest is returned.

    Args:
        unary: for each variable, the cost of each of its choices (at least one).
        pairwise: for two different variables (i, j), the costs of their choices, of shape
            (choices of i, choices of j). (i, j) and (j, i) may both be there and add up.
        starts: known solutions; the result is never worse.

    Returns:
        The solution; among equals always the same one.
    """
    left = without_dominated(unary, pairwise)
    elimination = _Elimination(unary, pairwise, left, limit)
    among_left = elimination.run()
    choices = [int(kept[choice]) for kept, choice in zip(left, among_left, strict=True)]
    found = Solution(tuple(choices), total(choices, unary, pairwise), elimination.bound)
    if found.exact:
        return found
    for start in ([*choices], *map(list, starts)):
        _improve(start, unary, pairwise)
        cost = total(start, unary, pairwise)
        if cost < found.cost:
            found = Solution(tuple(start), cost, found.bound)
    return found


@final
@dataclass
class _MadeTables:
    """A cache of derived tables, keyed by the identity of their source tables.

    Layers of a model share their tables, so the tables derived for one layer serve all.
    """

    tables: dict[tuple[object, ...], Any] = field(default_factory=dict)
    sources: list[object] = field(default_factory=list)

    def get(self, key: tuple[object, ...], sources: object, make: Callable[[], _T]) -> _T:
        """The result of `make`, called once for a key; `sources` are kept, so that their identities stay theirs."""
        if key not in self.tables:
            self.sources.append(sources)
            self.tables[key] = make()
        found: _T = self.tables[key]
        return found

    def narrowed(
        self, table: Table, kept: tuple[Choices, ...], names: tuple[bytes, ...]
    ) -> tuple[Table, float]:
        """A table's entries for some choices, without the least of them, and that; no dimensions of one choice.

        numpy's tables have at most 64 dimensions. `names` are the choices as bytes, to look them up.
        """

        def make() -> tuple[Table, float]:
            part = np.asarray(table[np.ix_(*kept)], np.float64)
            return _without_least(part, tuple(size for size in part.shape if size > 1))

        return self.get(("part", id(table), *names), table, make)

    def least_over(
        self, factors: Sequence[_Factor], variables: tuple[int, ...]
    ) -> tuple[Table, float]:
        """The sum of tables over `variables`, least over the last: without its least entry, and that."""
        place = {variable: index for index, variable in enumerate(variables)}
        places = [tuple([place[v] for v in factor.variables]) for factor in factors]
        tables = [factor.table for factor in factors]
        key = ("sum", len(variables), *map(id, tables), *places)

        def make() -> tuple[Table, float]:
            total: Table = np.zeros((1,) * len(variables))
            for table, where in zip(tables, places, strict=True):
                shape = [1] * len(variables)
                for at, size in zip(where, table.shape, strict=True):
                    shape[at] = size
                total = total + table.transpose(np.argsort(where)).reshape(shape)
            least: Table = total.min(axis=-1)
            return _without_least(least, least.shape)

        return self.get(key, tables, make)

    def best(self, factors: Sequence[_Factor], variable: int, choices: Sequence[int]) -> int:
        """The best choice of a variable where the others in its tables have theirs."""
        where = [
            tuple([-1 if v == variable else choices[v] for v in factor.variables])
            for factor in factors
        ]
        tables = [factor.table for factor in factors]
        key = ("best", *map(id, tables), *where)
        return self.get(key, tables, lambda: int(np.argmin(sum(map(_along, tables, where)))))


@final
@dataclass
class _Elimination:
    """The state of one elimination.

    Attributes:
        unary, pairwise: as in `minimize`.
        factors: live tables by number; every variable in them is still open.
        factors_of: numbers of the live tables that mention each variable.
        neighbours: open variables that share a table with each open variable.
        bound: the sum of the constants subtracted from tables, so that small differences are
            not lost beside large sums.
    """

    unary: Sequence[Table]
    pairwise: Mapping[tuple[int, int], Table]
    left: Sequence[Choices]
    limit: int
    known: _MadeTables = field(default_factory=_MadeTables)
    bound: float = 0.0
    added: int = 0
    factors: dict[int, _Factor] = field(default_factory=dict)
    factors_of: list[set[int]] = field(default_factory=list)
    neighbours: list[set[int]] = field(default_factory=list)
    order: list[_Eliminated] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def run(self) -> list[int]:
        left, sizes = self.left, list(map(len, self.left))
        self.sizes, names = sizes, [each.tobytes() for each in left]
        self.factors_of = [set() for _ in left]
        self.neighbours = [set() for _ in left]
        for i, table in enumerate(self.unary):
            own = (i,) if sizes[i] > 1 else ()
            self._add(own, *self.known.narrowed(table, (left[i],), (names[i],)))
        for (i, j), table in self.pairwise.items():
            both = tuple([v for v in (i, j) if sizes[v] > 1])
            found = self.known.narrowed(table, (left[i], left[j]), (names[i], names[j]))
            self._add(both, *found)
        is_open = {variable for variable, size in enumerate(self.sizes) if size > 1}
        now = {variable: self._size(variable) for variable in is_open}
        heap = [(size, variable) for variable, size in now.items()]
        heapq.heapify(heap)
        while is_open:
            size, variable = heapq.heappop(heap)
            if variable not in is_open or size != now[variable]:
                continue  # stale: an entry with the present size is in the heap too
            touched, factors = self.neighbours[variable], self._take(variable)
            self.order.append(_Eliminated(variable, tuple(factors)))
            for group in self._groups(variable, size, factors):
                around = {v for factor in group for v in factor.variables}
                others = tuple(sorted(around - {variable}))
                self._add(others, *self.known.least_over(group, (*others, variable)))
            is_open.discard(variable)
            for other in touched:
                now[other] = self._size(other)
                heapq.heappush(heap, (now[other], other))
        # Last eliminated first: by then the choices of each variable's neighbours are known.
        choices = [0] * len(self.unary)
        for variable, eliminated in reversed(self.order):
            choices[variable] = self.known.best(eliminated, variable, choices)
        return choices

    def _size(self, variable: int) -> int:
        return math.prod([self.sizes[o] for o in self.neighbours[variable]]) * self.sizes[variable]

    def _groups(
        self, variable: int, size: int, factors: Sequence[_Factor]
    ) -> Iterable[list[_Factor]]:
        """All tables together where that is small enough; else in as few groups as first fit finds."""
        largest_first = sorted(factors, key=lambda factor: -factor.table.size)
        if size <= self.limit:
            return [largest_first]
        groups: list[tuple[set[int], list[_Factor]]] = []
        for factor in largest_first:
            for around, group in groups:
                if math.prod([self.sizes[o] for o in around.union(factor.variables)]) <= self.limit:
                    around.update(factor.variables)
                    group.append(factor)
                    break
            else:
                groups.append(({variable, *factor.variables}, [factor]))
        return (group for _, group in groups)

    def _add(self, variables: tuple[int, ...], table: Table, least: float) -> None:
        self.bound += least
        if not variables:
            return
        number = self.added
        self.added += 1
        self.factors[number] = _Factor(variables, table)
        for variable in variables:
            self.factors_of[variable].add(number)
            if len(variables) > 1:
                around = self.neighbours[variable]
                around.update(variables)
                around.discard(variable)

    def _take(self, variable: int) -> list[_Factor]:
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


def _without_least(table: Table, shape: tuple[int, ...]) -> tuple[Table, float]:
    least = float(table.min())
    return (table - least).reshape(shape), least


def _along(table: Table, where: Sequence[int]) -> Table:
    column: Table = table[tuple(slice(None) if place < 0 else place for place in where)]
    return column


def _improve(
    choices: list[int], unary: Sequence[Table], pairwise: Mapping[tuple[int, int], Table]
) -> None:
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


def total(
    choices: Sequence[int], unary: Sequence[Table], pairwise: Mapping[tuple[int, int], Table]
) -> float:
    """The sum of all tables' entries for these choices."""
    own = sum(float(table[choice]) for table, choice in zip(unary, choices, strict=True))
    return own + sum(float(table[choices[i], choices[j]]) for (i, j), table in pairwise.items())
