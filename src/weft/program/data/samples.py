"""Samples as workers load them: each draws by its own number, and errors name it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

from torch.utils.data import Dataset, IterableDataset

from weft.program.data.order import drawn_by, mixed


@final
@dataclass(frozen=True)
class LoadedRows:
    """Collated rows of a batch, or the error of one of its samples."""

    batch: Any
    error: str = ""


@final
class Samples(Dataset[LoadedRows]):
    """Rows of batches, by the numbers of their samples.

    Args:
        dataset: map-style.
        collate: makes a batch of samples.
        seed: by which samples draw, with their numbers and the epoch.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, rows: tuple[int, Sequence[int]]) -> LoadedRows:
        epoch, numbers = rows
        found = []
        for number in numbers:
            try:
                with drawn_by(mixed(self._seed, epoch, number)):
                    found.append(self._dataset[number])
            except Exception as error:
                return LoadedRows(None, f"sample {number}: {type(error).__name__}: {error}")
        what = f"samples {numbers[0]} to {numbers[-1]}"
        with drawn_by(mixed(self._seed, epoch, numbers[0], len(numbers))):
            return collated(self._collate, found, what)


@final
class Stream(IterableDataset[tuple[int, LoadedRows]]):
    """Rows of the batches of an iterable dataset, which is read in order.

    Args:
        dataset: iterable.
        collate: makes a batch of samples.
        size: samples of a batch.
        rows: of each batch that are wanted.
        skipped: batches that are passed over first.
        drop_last: leaves out a last batch of fewer samples.
        seed: by which the dataset draws.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collate: Callable[[list[Any]], Any],
        size: int,
        rows: Sequence[int],
        skipped: int,
        drop_last: bool,
        seed: int,
    ) -> None:
        self._dataset, self._collate, self._size = dataset, collate, size
        self._rows, self._skipped, self._drop_last = rows, skipped, drop_last
        self._seed = seed

    def __iter__(self) -> Iterator[tuple[int, LoadedRows]]:
        source, number = self._drawn(), 0
        while True:
            try:
                samples = list(islice(source, self._size))
            except Exception as error:
                place = number * self._size
                yield (
                    0,
                    LoadedRows(
                        None, f"sample {place} or after it: {type(error).__name__}: {error}"
                    ),
                )
                return
            if not samples or (self._drop_last and len(samples) < self._size):
                return
            number += 1
            if number > self._skipped:
                short = len(samples) < self._size
                own = samples if short else [samples[row] for row in self._rows]
                with drawn_by(mixed(self._seed, number, len(own))):
                    batch = collated(self._collate, own, f"batch {number - 1}")
                yield len(samples), batch

    def _drawn(self) -> Iterator[Any]:
        """The samples; each draws by its number."""
        with drawn_by(mixed(self._seed)):
            source, number = iter(self._dataset), 0
        while True:
            with drawn_by(mixed(self._seed, number)):
                try:
                    sample = next(source)
                except StopIteration:
                    return
            number += 1
            yield sample


def collated(collate: Callable[[list[Any]], Any], samples: list[Any], what: str) -> LoadedRows:
    """Samples as a batch; the error that `collate` raises, with what they are."""
    try:
        return LoadedRows(collate(samples))
    except Exception as error:
        return LoadedRows(None, f"{what}: they cannot be collated: {type(error).__name__}: {error}")
