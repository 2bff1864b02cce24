"""Plan rows: one capture for all strategies of a size."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

import weft
from tools.real_sizes.facts import Facts, facts
from tools.real_sizes.family import Family, Shape
from tools.real_sizes.judge import Check, checks
from tools.real_sizes.measure import Planned, planned
from tools.real_sizes.rows import FAMILIES, Row
from tools.real_sizes.textbook import Figures, Grid
from weft.capture import Captured, capture
from weft.compiler.context import options_of
from weft.compiler.pipeline import compile_graph
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import strategy_hints
from weft.ir.logical import Input, Update


@dataclass(frozen=True)
class Result:
    """What came of a row.

    Attributes:
        row: which.
        seconds: of process time to plan it, without the capture.
        checks: every figure; empty after an error.
        planned, book: the figures.
        error: its type and message, in place of figures.
    """

    row: Row
    seconds: float
    checks: tuple[Check, ...] = ()
    planned: Planned | None = None
    book: Figures | None = None
    error: str = ""

    @property
    def fails(self) -> bool:
        """Whether the row is not as the textbook says, nor explained."""
        return bool(self.error) or any(check.verdict == "FAIL" for check in self.checks)


@dataclass
class Sized:
    """A family at one size, captured once.

    Attributes:
        beside: plans to compare peaks with, by their grid.
    """

    family: Family
    shape: Shape
    captured: Captured
    facts: Facts
    beside: dict[Grid, Planned] = field(default_factory=dict)

    @staticmethod
    def of(family: Family, shape: Shape) -> Sized:
        """Capture it."""
        model = family.model(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = family.batch(shape.sequences, shape.tokens)
        precision = "bf16" if shape.precision == "bf16" else None
        captured = capture(model, family.loss, optimizer, batch, "cpu", True, precision)
        targets = {update.target.name for update in captured.graph.of_kind(Update)}
        inputs = captured.graph.of_kind(Input)
        trained = {node.key for node in inputs if node.value.name in targets}
        return Sized(family, shape, captured, facts(family, shape, model, trained))

    def planned(self, strategy: weft.Strategy, grid: Grid) -> Planned:
        """The figures of one rank, or of one rank of each stage, under a strategy."""
        ranks = torch.arange(math.prod(grid)).reshape(grid).tolist()
        placement = weft.placement("cpu", ranks)
        options = options_of(strategy)
        stages = stage_placements(options.stages, placement)
        hints = strategy_hints(strategy, self.captured.graph, stages)
        first = tuple(stage.ranks[0] for stage in stages)
        return planned(compile_graph(self.captured.graph, hints, placement, first, options))

    def data_parallel(self, grid: Grid) -> Planned:
        """The data-parallel plan, once."""
        if grid not in self.beside:
            self.beside[grid] = self.planned(weft.data_parallel(), grid)
        return self.beside[grid]


@dataclass
class Planner:
    """Plans rows; captures of the size of the row before, and of one device beside it, are kept."""

    sizes: dict[tuple[str, Shape], Sized] = field(default_factory=dict)

    def judge(self, row: Row) -> Result:
        """Plan a row and compare it."""
        kind, grid, start = row.of_kind, row.grid, time.process_time()
        try:
            sized = self.sized(row.family, row.shape)
            start = time.process_time()
            strategy = kind.strategy(sized.family)
            found = sized.planned(strategy, kind.grid_of(grid))
            seconds = time.process_time() - start
            if row.kind == "data":
                sized.beside[grid] = found
            beside = self.beside(row, sized)
        except Exception as error:
            return Result(
                row, time.process_time() - start, error=f"{type(error).__name__}: {error}"
            )
        book = kind.textbook(sized.facts, grid)
        return Result(
            row, seconds, tuple(checks(row.family, row.kind, found, book, beside)), found, book
        )

    def beside(self, row: Row, sized: Sized) -> Planned:
        """The plan whose peak is not to be exceeded: data parallel, and for that one device with a rank's sequences."""
        if row.kind != "data":
            return sized.data_parallel(row.of_kind.beside(row.grid))
        sequences = row.shape.sequences // row.grid[0]
        return self.sized(row.family, replace(row.shape, sequences=sequences)).data_parallel((1,))

    def sized(self, name: str, shape: Shape) -> Sized:
        """A family at a size; of other models nothing is kept."""
        if (name, shape) not in self.sizes:
            same = {key for key in self.sizes if key[0] == name and _alike(key[1], shape)}
            self.sizes = {key: self.sizes[key] for key in same}
            self.sizes[name, shape] = Sized.of(FAMILIES[name], shape)
        return self.sizes[name, shape]


def _alike(one: Shape, other: Shape) -> bool:
    return replace(one, sequences=0) == replace(other, sequences=0)


def results(rows: Sequence[Row]) -> Iterator[Result]:
    """Plan rows in order; those of one family and size share a capture."""
    planner = Planner()
    return map(planner.judge, rows)
