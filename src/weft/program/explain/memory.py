"""The result of `Program.memory`: the peak of every rank, as the plan says it and as it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import final

from rich.table import Table

from weft.compiler.memory.walk import Peak
from weft.ir.alias import Memory
from weft.program.explain.tables import table, text_of
from weft.units import bytes_text

KINDS = tuple(each.name for each in fields(Memory))


@final
@dataclass(frozen=True)
class RankMemory:
    """The peak of one rank.

    Attributes:
        predicted: what the plan says, by kind, at the moment when it is most.
        measured: what tensors took in the first step at their most; None before it.
    """

    rank: int
    predicted: Memory
    measured: Memory | None


@final
@dataclass(frozen=True)
class ProgramMemory:
    """The peaks of the ranks of this process; prints as a table."""

    ranks: tuple[RankMemory, ...]

    def __iter__(self) -> Iterator[RankMemory]:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> RankMemory:
        """The memory of a rank, by its number.

        Raises:
            KeyError: for ranks that are not of this process.
        """
        return {each.rank: each for each in self.ranks}[rank]

    def __str__(self) -> str:
        return text_of(self.table())

    def table(self) -> Table:
        """A row for each rank and source."""
        rows = [
            (str(each.rank), source, *_sizes(found))
            for each in self.ranks
            for source, found in (("predicted", each.predicted), ("measured", each.measured))
            if found is not None
        ]
        return table(
            "memory at its peak, as the plan states it and as measured",
            ("rank", "", *KINDS, "peak"),
            rows,
        )


def program_memory(peaks: Iterable[Peak], measured: Mapping[int, Memory | None]) -> ProgramMemory:
    """The peaks of ranks as their plans say them, with what was measured so far."""
    return ProgramMemory(
        tuple(RankMemory(each.rank, each.memory, measured.get(each.rank)) for each in peaks)
    )


def _sizes(found: Memory) -> tuple[str, ...]:
    return tuple(
        bytes_text(size) for size in (*(getattr(found, kind) for kind in KINDS), found.peak)
    )
