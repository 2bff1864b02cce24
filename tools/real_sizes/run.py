"""Plan rows: one capture for all strategies of a size."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

import weft
from tools.real_sizes.facts import Facts, facts
from tools.real_sizes.family import Family, Shape
from tools.real_sizes.judge import Check, checks
from tools.real_sizes.measure import Planned, planned
from tools.real_sizes.plans import Kind
from tools.real_sizes.rows import FAMILIES, Row
from tools.real_sizes.textbook import Figures, Grid
from weft.capture import Captured, capture
from weft.compiler.pipeline import compile_graph
from weft.compiler.stages import stage_placements
from weft.ir.logical import Input, Update
from weft.program.hints import strategy_hints


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

    def plan(self, kind: Kind, grid: Grid) -> Planned:
        """Plan one rank, or one of each stage."""
        strategy = kind.strategy(self.family)
        return self.planned(strategy, kind.grid_of(grid))

    def planned(self, strategy: weft.Strategy, grid: Grid) -> Planned:
        """The figures of a strategy on a grid."""
        ranks = torch.arange(math.prod(grid)).reshape(grid).tolist()
        placement = weft.placement("cpu", ranks)
        options = strategy.options()
        stages = stage_placements(options.stages, placement)
        hints = strategy_hints(strategy, self.captured.graph, stages)
        first = tuple(stage.ranks[0] for stage in stages)
        return planned(compile_graph(self.captured.graph, hints, placement, first, options))

    def data_parallel(self, grid: Grid) -> Planned:
        """The plan whose peak is not to be exceeded."""
        if grid not in self.beside:
            self.beside[grid] = self.planned(weft.data_parallel(), grid)
        return self.beside[grid]

    def judge(self, row: Row) -> Result:
        """Plan a row and compare it."""
        start = time.process_time()
        kind, grid = row.of_kind, row.grid
        try:
            found = self.plan(kind, grid)
            seconds = time.process_time() - start
            beside = None if row.kind == "data" else self.data_parallel(kind.beside(grid))
        except Exception as error:
            return Result(row, time.process_time() - start, error=_told(error))
        if row.kind == "data":
            self.beside[grid] = found
        book = kind.textbook(self.facts, grid)
        verdicts = checks(row.family, row.kind, found, book, beside)
        return Result(row, seconds, tuple(verdicts), found, book)


def results(rows: Sequence[Row]) -> Iterator[Result]:
    """Plan rows in order; those of one family and size that stand together share its capture."""
    sized: Sized | None = None
    key: tuple[str, Shape] | None = None
    failed = ""
    for row in rows:
        if (row.family, row.shape) != key:
            key, sized, failed = (row.family, row.shape), None, ""
            try:
                sized = Sized.of(FAMILIES[row.family], row.shape)
            except Exception as error:
                failed = f"capture: {_told(error)}"
        yield Result(row, 0.0, error=failed) if sized is None else sized.judge(row)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
