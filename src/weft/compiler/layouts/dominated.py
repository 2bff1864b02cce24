"""Choices that a minimisation can skip, because another choice of the same variable is never more expensive.

Dead-end elimination (Goldstein 1994): a choice is removed if another one costs
no more for all choices of the neighbours. At least one best solution stays, so a proof for the remaining choices holds
for all. Most choices of a training step are removed, because replicated work is expensive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

Table: TypeAlias = npt.NDArray[np.float64]
Choices: TypeAlias = npt.NDArray[np.intp]


def without_dominated(
    unary: Sequence[Table], pairwise: Mapping[tuple[int, int], Table]
) -> list[Choices]:
    """For each variable its choices that are left, in order; at least one.

    Args:
        unary: for each variable, the cost of each of its choices.
        pairwise: for two different variables (i, j), the costs of their choices, of shape (choices
            of i, choices of j).
    """
    return _Pruning(unary, pairwise).run()


@final
@dataclass
class _Pruning:
    """The state of the walk.

    Attributes:
        around: for each variable its neighbours, each with the table that has the variable first.
        kinds: for each variable a number for its own table and those of its neighbours.
        names: the same as bytes, to look them up.
        worst: by table and choices on both sides: how much more expensive each choice is than each other
            in the worst case; layers share tables, so most are there already.
        kept: the places of the choices that stay, by everything they depend on: the variable's kind and
            choices, and each neighbour's choices.
    """

    unary: Sequence[Table]
    pairwise: Mapping[tuple[int, int], Table]
    around: list[list[tuple[int, Table, tuple[int, bool]]]] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    left: list[Choices] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    worst: dict[tuple[object, ...], Table] = field(default_factory=dict)
    kept: dict[tuple[object, ...], list[int]] = field(default_factory=dict)

    def run(self) -> list[Choices]:
        every = {size: np.arange(size) for size in set(map(len, self.unary))}
        named = {size: choices.tobytes() for size, choices in every.items()}
        self.left = [every[len(table)] for table in self.unary]
        self.names = [named[len(table)] for table in self.unary]
        self.around = [[] for _ in self.unary]
        for (i, j), table in self.pairwise.items():
            self.around[i].append((j, table, (id(table), False)))
            self.around[j].append((i, table.T, (id(table), True)))
        known: dict[tuple[object, ...], int] = {}
        for own, neighbours in zip(self.unary, self.around, strict=True):
            key = id(own), *(name for _, _, name in neighbours)
            self.kinds.append(known.setdefault(key, len(known)))
        due = set(range(len(self.unary)))
        while due:
            shrunk = [variable for variable in sorted(due) if self._shrinks(variable)]
            due = {other for one in shrunk for other, _, _ in self.around[one]} | set(shrunk)
        return self.left

    def _shrinks(self, variable: int) -> bool:
        mine, names = self.left[variable], self.names
        if len(mine) == 1:
            return False
        theirs = [names[other] for other, _, _ in self.around[variable]]
        key = (self.kinds[variable], names[variable], *theirs)
        kept = self.kept.get(key)
        if kept is None:
            own = self.unary[variable][mine]
            dearer = own[:, None] - own[None, :]
            for other, table, name in self.around[variable]:
                known = (name, mine.tobytes(), names[other])
                if known not in self.worst:
                    part = table[np.ix_(mine, self.left[other])]
                    self.worst[known] = (part[:, None, :] - part[None, :, :]).max(axis=2)
                dearer = dearer + self.worst[known]
            kept = self.kept[key] = _undominated_choices(dearer)
        if len(kept) == len(mine):
            return False
        self.left[variable] = mine[kept]
        names[variable] = self.left[variable].tobytes()
        return True


def _undominated_choices(dearer: Table) -> list[int]:
    """The choices that stay, where `dearer[b, a]` says how much more b costs than a in the worst case.

    Among choices that are always equal the first stays.
    """
    never_dearer = dearer <= 0.0
    if never_dearer.sum() == len(dearer):  # each than itself
        return list(range(len(dearer)))
    gone: set[int] = set()
    for choice in reversed(range(len(dearer))):
        better = never_dearer[:, choice].nonzero()[0].tolist()
        if any(other != choice and other not in gone for other in better):
            gone.add(choice)
    return [choice for choice in range(len(dearer)) if choice not in gone]
