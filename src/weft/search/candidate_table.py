"""Candidates by column: lower bounds and estimates of a hundred thousand of them are a few sums of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from weft.cached import cached_property
from weft.search.candidate import (
    COLUMNS,
    DEFAULTS,
    LAYOUTS,
    SCHEDULE_NAMES,
    SCHEDULES,
    WIDTH,
    Candidate,
    Layouts,
    point_of,
    row_of,
)

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

# Bits that a number of ranks along an axis takes at most.
_BITS = 21


def layouts_code(layouts: Layouts) -> int:
    """The number of a way to lay a model out, in columns."""
    return LAYOUTS.index(layouts)


def schedule_code(schedule: str) -> int:
    """The number of a schedule, in columns."""
    return SCHEDULES.index(schedule)


@final
class _Column:
    """A column of candidates: the coordinate of its name."""

    def __set_name__(self, owner: type[CandidateTable], name: str) -> None:
        self._place = COLUMNS[name]

    def __get__(self, candidates: CandidateTable, owner: type[CandidateTable]) -> Ints:
        return candidates.rows[:, self._place]


@final
class _Truth:
    """A column of a coordinate that is true or false."""

    def __set_name__(self, owner: type[CandidateTable], name: str) -> None:
        self._place = COLUMNS[name]

    def __get__(self, candidates: CandidateTable, owner: type[CandidateTable]) -> Mask:
        found: Mask = candidates.rows[:, self._place] == 1
        return found


@final
@dataclass(frozen=True, eq=False)
class CandidateTable:
    """Candidates of the space.

    Attributes:
        rows: [candidates, coordinates], in the order of `Candidate`'s fields; names and truths as numbers.
    """

    rows: Ints
    _made: dict[int, Candidate] = field(default_factory=dict, repr=False)

    # The columns by name: `layouts` has numbers of `layouts_code`, `schedule` those of `schedule_code`.
    data = _Column()
    tensor = _Column()
    stages = _Column()
    layouts = _Column()
    micro_batches = _Column()
    schedule = _Column()
    zero = _Column()
    recompute = _Column()
    outer = _Truth()
    turns = _Column()
    offload = _Column()
    experts = _Truth()

    @staticmethod
    def of(candidates: Iterable[Candidate]) -> CandidateTable:
        """These candidates."""
        return CandidateTable(
            np.array([row_of(each) for each in candidates], np.int64).reshape(-1, WIDTH)
        )

    @staticmethod
    def made(count: int, data: int | Ints, **columns: int | Ints) -> CandidateTable:
        """So many candidates, by the numbers of their coordinates; others are as in a plain `Candidate`."""
        rows = np.empty((count, WIDTH), np.int64)
        for name, numbers in {**DEFAULTS, "data": data, **columns}.items():
            rows[:, COLUMNS[name]] = numbers
        return CandidateTable(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.candidate, range(len(self)))

    def candidate(self, number: int) -> Candidate:
        """The candidate at an index."""
        found = self._made.get(number)
        if found is None:
            found = self._made[number] = point_of(self.rows[number].tolist())
        return found

    def where(self, mask: Mask) -> CandidateTable:
        """The candidates where the mask is true."""
        return CandidateTable(self.rows[mask])

    def data_parallel(self) -> CandidateTable:
        """With all ranks along the data axis, and every parameter whole."""
        whole = {name: DEFAULTS[name] for name in ("tensor", "layouts", "outer", "experts")}
        return self._with(data=self.data * self.tensor, **whole)

    def with_all_kept(self) -> CandidateTable:
        """The candidates without recompute or offload."""
        return self._with(recompute=0, offload=0)

    def laid_as(self, layouts: Layouts, others: Layouts) -> CandidateTable:
        """The candidates with one layout replaced by another."""
        laid = np.where(self.laid(layouts), layouts_code(others), self.layouts)
        return self._with(layouts=laid)

    def _with(self, **columns: int | Ints) -> CandidateTable:
        rows = self.rows.copy()
        for name, numbers in columns.items():
            rows[:, COLUMNS[name]] = numbers
        return CandidateTable(rows)

    def number(self, candidate: Candidate) -> int | None:
        """The row of a candidate; None if it is none of them."""
        found = np.flatnonzero(self._is(candidate))
        return int(found[0]) if len(found) else None

    def without(self, candidates: Iterable[Candidate]) -> CandidateTable:
        """All but these."""
        left = np.ones(len(self), np.bool_)
        for candidate in candidates:
            left &= ~self._is(candidate)
        return self.where(left)

    def _is(self, candidate: Candidate) -> Mask:
        found: Mask = (self.rows == np.array(row_of(candidate))).all(axis=1)
        return found

    def flat_as(self, candidate: Candidate) -> Mask:
        """The candidates that equal this one but for stages, turns and schedule."""
        same = self.rows == np.array(row_of(candidate))
        same[:, [COLUMNS[name] for name in ("stages", "schedule", "turns")]] = True
        found: Mask = same.all(axis=1)
        return found

    @property
    def axes(self) -> Ints:
        """The number of axes of each one's grid."""
        one = self.laid("data") | (self.laid("free") & (self.tensor == 1))
        found: Ints = 2 - one.astype(np.int64) + (self.turns > 1)
        return found

    @cached_property
    def ranks(self) -> Ints:
        """The number of ranks of each candidate."""
        found: Ints = self.data * self.tensor * self.stages
        return found

    def laid(self, layouts: Layouts) -> Mask:
        """The candidates with these layouts."""
        found: Mask = self.layouts == layouts_code(layouts)
        return found

    def scheduled(self, *schedules: str) -> Mask:
        """The candidates with one of these schedules."""
        found: Mask = np.isin(self.schedule, [schedule_code(each) for each in schedules])
        return found

    @cached_property
    def by_hand(self) -> Mask:
        """True if people write such strategies: the result is never worse than those of them that were planned."""
        plain = ~self.laid("free") & ~self.outer & (self.recompute == 0) & (self.offload == 0)
        plain &= ~self.experts
        alone = (self.stages == 1) & (self.laid("data") | (self.zero < 2))
        times = self.micro_batches // self.stages
        deep = (self.micro_batches % self.stages == 0) & ((times == 2) | (times == 4))
        staged = deep & (self.zero == 0) & ~self.scheduled("") & (self.turns <= 2)
        found: Mask = plain & np.where(self.stages == 1, alone, staged)
        return found

    def unevenness(self, samples: int) -> Floats:
        """Samples of a micro-batch on the rank that has the most of them, over the mean of all ranks."""
        parts = self.data * self.micro_batches
        found: Floats = (
            np.ceil(samples / parts) * parts / samples if samples else np.ones(len(self))
        )
        return found

    @cached_property
    def grids(self) -> Ints:
        """For each candidate the number of its grid (data, tensor, stages)."""
        key = (self.data << 2 * _BITS) | (self.tensor << _BITS) | self.stages
        found: Ints = np.unique(key, return_inverse=True)[1]
        return found


# Those without stages begin with the levels of ZeRO, in their order; pipelines are by the schedule that a candidate
# names.
KINDS = (
    *("data parallel", "ZeRO 1", "ZeRO 2", "ZeRO 3", "Megatron grid"),
    *("GPipe", "1F1B", "interleaved", "zero bubble"),
)


def kinds_of(candidates: CandidateTable) -> Ints:
    """The kinds of strategies that people write by hand, by their numbers in `KINDS`."""
    grid = KINDS.index("Megatron grid")
    names = [SCHEDULE_NAMES[each] for each in SCHEDULES]
    staged = [KINDS.index(name) if name in KINDS else grid for name in names]
    alone = np.where(candidates.laid("data"), candidates.zero, grid)
    return np.where(candidates.stages > 1, np.array(staged)[candidates.schedule], alone)
