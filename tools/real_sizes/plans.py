"""The strategies that are planned, each with the textbook's figures for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import weft
from tools.real_sizes import textbook
from tools.real_sizes.family import Family
from tools.real_sizes.textbook import Grid, Textbook

MICRO_BATCHES = 8
# The textbook's tokens spread evenly over the experts.
EVEN = 1.0


@dataclass(frozen=True)
class Kind:
    """A strategy by name.

    Attributes:
        strategy: of a family, for `weft.compile`.
        textbook: the figures of a step under it.
        stages: whether the first axis of the grid numbers stages.
    """

    strategy: Callable[[Family], weft.Strategy]
    textbook: Textbook
    stages: bool = False

    def grid_of(self, grid: Grid) -> Grid:
        """The placement's grid."""
        return (grid[0] * grid[1],) if self.stages else grid

    def beside(self, grid: Grid) -> Grid:
        """The ranks of the data-parallel plan whose peak must not be exceeded: as many sequences a rank."""
        if self.stages:
            return self.grid_of(grid)
        return (
            grid if self.textbook not in (textbook.tensor, textbook.sequence) else (1, *grid)[-2:-1]
        )


def _zero(level: Literal[1, 2, 3]) -> Callable[[Family], weft.Strategy]:
    return lambda family: replace(weft.data_parallel(), zero=weft.Zero(level))


def _tensor(sequence: int | None, hybrid: bool) -> Callable[[Family], weft.Strategy]:
    make = weft.hybrid_parallel if hybrid else weft.tensor_parallel

    def strategy(family: Family) -> weft.Strategy:
        found = make((*family.columns, *family.tables), family.rows)
        # Whole experts on each rank: their outputs are summed as a row layer's.
        sbp = (weft.broadcast, weft.split(0)) if hybrid else weft.split(0)
        experts = dict.fromkeys(family.experts, sbp)
        found = replace(found, parameters={**experts, **found.parameters}, expert_capacity=EVEN)
        if sequence is None:
            return found
        laid = make(family.columns, family.rows, sequence).activations
        return replace(found, activations=laid)

    return strategy


def _pipeline(stages: int, zero: weft.Zero | None) -> Callable[[Family], weft.Strategy]:
    strategy = replace(weft.data_parallel(), stages=stages, micro_batches=MICRO_BATCHES, zero=zero)
    return lambda family: strategy


KINDS: Mapping[str, Kind] = {
    "data": Kind(lambda family: weft.data_parallel(), textbook.data),
    "ZeRO 1": Kind(_zero(1), textbook.zero_1),
    "ZeRO 2": Kind(_zero(2), textbook.zero_1),
    "ZeRO 3": Kind(_zero(3), textbook.zero_3),
    "tensor": Kind(_tensor(None, False), textbook.tensor),
    "tensor + sequence": Kind(_tensor(1, False), textbook.sequence),
    "hybrid": Kind(_tensor(None, True), textbook.tensor),
    "hybrid + sequence": Kind(_tensor(1, True), textbook.sequence),
    "experts": Kind(
        lambda family: weft.expert_parallel(family.experts, capacity=EVEN), textbook.experts
    ),
    "tables": Kind(lambda family: weft.expert_parallel(family.lookups), textbook.tables),
    "pipeline": Kind(_pipeline(4, None), textbook.pipeline(MICRO_BATCHES), stages=True),
    "pipeline + ZeRO 1": Kind(
        _pipeline(4, weft.Zero(1)), textbook.pipeline(MICRO_BATCHES, zero=True), stages=True
    ),
    "recompute": Kind(
        lambda family: replace(weft.data_parallel(), recompute=family.blocks), textbook.recomputed
    ),
    "deduced": Kind(lambda family: weft.Strategy(), textbook.data),
}
