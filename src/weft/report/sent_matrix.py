"""The bytes of a step as a matrix: which rank sends how much to which, and what for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.boxing import BoxingStep
from weft.boxing.box_steps import step_groups
from weft.boxing.halo import Halo
from weft.compiler.pipeline import Compiled
from weft.layout import overlap, region_size
from weft.planning.exchanges import Exchanged, exchanges
from weft.simulator.planned import whole_pieces
from weft.units import ITEM_SIZE

# Rows and columns of the matrix; of more ranks, as many as needed share one.
MOST_CELLS = 64
# Exchanges that are named for a group, at most.
_NAMED = 12
Sizes: TypeAlias = npt.NDArray[np.float64]
# Places of ranks that send and that receive, and bytes between each two of them.
_Pairs: TypeAlias = "tuple[Any, Any, float]"


def sent_bytes(compiled: Compiled) -> dict[str, Any]:
    """The matrix as JSON has it, folded to `MOST_CELLS` rows; nothing if no rank sends.

    The bytes of a collective are spread evenly over the pairs of its ranks: the routes of a library are unknown.
    Bytes of transfers and of border rows are exact.
    """
    every = tuple(exchanges(compiled))
    ranks = sorted({rank for each in compiled.stages.placements for rank in each.ranks})
    if not every or len(ranks) < 2:
        return {}
    spread = _RankSpread(ranks).of(every)
    groups = sorted(spread, key=lambda group: -float(spread[group].sum()))
    apart = -(-len(ranks) // MOST_CELLS)
    folded = [_folded(spread[group], apart) for group in groups]
    kinds = [
        {kind for each in every if each.group == group for kind in each.kinds} for group in groups
    ]
    return {
        "ranks": ranks,
        "apart": apart,
        "groups": groups,
        "kinds": [sorted(each) for each in kinds],
        "cells": [
            [int(row), int(column), number, round(float(sizes[row, column]))]
            for number, sizes in enumerate(folded)
            for row, column in zip(*np.nonzero(sizes), strict=True)
        ],
        "largest": _largest(every),
    }


def _largest(every: tuple[Exchanged, ...]) -> list[list[Any]]:
    joined: dict[tuple[str, str], list[int]] = {}
    for each in every:
        known = joined.setdefault((each.group, each.text), [0, 0])
        known[0] += each.bytes
        known[1] += each.times
    found: list[list[Any]] = []
    seen = dict[str, int]()
    for (group, text), (size, times) in sorted(joined.items(), key=lambda item: -item[1][0]):
        seen[group] = seen.get(group, 0) + 1
        if seen[group] <= _NAMED:
            found.append([group, text, size, times])
    return found


def _folded(sizes: Sizes, apart: int) -> Sizes:
    """Blocks of `apart` rows and columns as one."""
    if apart == 1:
        return sizes
    places = np.arange(0, len(sizes), apart)
    rows: Sizes = np.add.reduceat(np.add.reduceat(sizes, places, axis=0), places, axis=1)
    return rows


@final
class _RankSpread:
    """Bytes by group: [from, to], by the places of ranks. Equal exchanges, as of repeated layers, are spread once.

    Args:
        ranks: all, in order.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._found: dict[str, Sizes] = {}
        self._pairs: dict[object, tuple[_Pairs, ...]] = {}

    def of(self, every: Iterable[Exchanged]) -> Mapping[str, Sizes]:
        times = Counter[tuple[str, object]]()
        for each in every:
            for key, pairs in self._of(each):
                if key not in self._pairs:
                    self._pairs[key] = tuple(pairs())
                times[each.group, key] += each.times
        for (group, key), number in times.items():
            sizes = self._found.setdefault(group, np.zeros((len(self._places),) * 2))
            for rows, columns, moved in self._pairs[key]:
                sizes[rows, columns] += moved * number
            np.fill_diagonal(sizes, 0.0)
        return self._found

    def _of(self, each: Exchanged) -> Iterator[tuple[object, Callable[[], Iterator[_Pairs]]]]:
        """The parts of an exchange: what tells it from others, and who sends how much to whom."""
        for step in each.sent:
            if step.kind == "transfer":
                yield (step, each.shape, each.dtype), partial(self._transfer, step, each)
            else:
                yield step, partial(self._collective, step)
        if each.halo is not None:
            yield (
                (each.halo.value.layout, each.shape, each.halo.wanted),
                partial(self._border, each.halo),
            )

    def _collective(self, step: BoxingStep) -> Iterator[_Pairs]:
        """Even shares of each pair of each group."""
        groups = [[self._places[rank] for rank in group] for group in step_groups(step)]
        pairs = sum(len(group) * (len(group) - 1) for group in groups)
        for group in groups:
            rows, columns = np.ix_(group, group)
            yield rows, columns, step.bytes / max(pairs, 1)

    def _transfer(self, step: BoxingStep, each: Exchanged) -> Iterator[_Pairs]:
        for source, target, size in whole_pieces(step, each.shape, each.dtype):
            yield self._places[source], self._places[target], size

    def _border(self, halo: Halo) -> Iterator[_Pairs]:
        """The border rows that each rank reads of each other one of its group."""
        for group in halo.groups:
            for reader in group:
                for holder in group:
                    given = region_size(overlap(halo.held[holder], halo.read[reader]))
                    if given:
                        size = given * ITEM_SIZE[halo.value.dtype]
                        yield self._places[holder], self._places[reader], size
