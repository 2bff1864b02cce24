"""Loader: the batches of a program, the same on any number of ranks, workers and processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any, Protocol, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from weft.errors import UserError, check, is_number, is_whole, wrong
from weft.program.data.feed import CutBatch, RowsOfBatch
from weft.program.data.loading import PrefetchedBatches, prefetched
from weft.program.data.order import by_similar_lengths, mixed, order_of, whole_number, whole_numbers
from weft.program.data.samples import HINT, LoadedRows, Samples, Stream, begin_worker, with_workers
from weft.program.data.whole_batch import mark_batch_whole

# Samples that all processes load at the begin of a loop, to compare them.
COMPARED = 3


class Taking(Protocol):
    """A program, as far as its batches go."""

    _core: Any

    def rows(self, size: int) -> list[int]:
        """The rows of a batch of so many that the ranks of this process take."""


@final
class Loader:
    """Batches of a dataset, in an order that seed and epoch alone decide.

    A `for` loop over it is one epoch. Each process loads the rows of its ranks with its own workers. The
    number of a sample seeds its random numbers from the generators of Python, numpy and torch, as in augmentations.

    Args:
        dataset: map-style (`__getitem__`, and `__len__` unless there is a sampler), or iterable, which each process
            reads in order.
        batch_size: samples of a whole batch, over all ranks.
        program: that takes the batches; without one, whole batches are loaded.
        shuffle: True for another permutation in each epoch.
        seed: of permutations and draws.
        workers: number of worker processes of each process; 0 for none, at most 1 for an iterable dataset.
        collate_fn: makes a batch of samples; `torch.utils.data.default_collate` by default. With workers it must
            be picklable as for `torch.utils.data.DataLoader`.
        drop_last: True leaves out the last batch of an epoch where it has fewer samples.
        sampler: gives the numbers of samples in place of `shuffle`; the same on all processes.
        ahead: batches that a worker loads ahead.
        timeout: seconds to wait for a batch of the workers; 0 for no limit.
        split: False if `collate_fn` must see all samples of a batch, as one that pads to the longest, or draws.
        lengths: of all samples, such as tokens, whole numbers from 0 (a list, an array or a tensor): samples of
            a batch then have similar lengths, with less padding.

    Raises:
        UserError: an argument is invalid.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        program: Taking | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        ahead: int = 2,
        timeout: float = 0,
        split: bool = True,
        lengths: Iterable[int] | None = None,
    ) -> None:
        batch_size, seed = _number("batch_size", batch_size, 1), _number("seed", seed)
        workers, ahead = _number("workers", workers, 0), _number("ahead", ahead, 1)
        takes = program is None or hasattr(program, "rows")
        collates = collate_fn is None or callable(collate_fn)
        check(
            "weft.Loader",
            (isinstance(shuffle, bool), "shuffle", "True or False", shuffle),
            (isinstance(drop_last, bool), "drop_last", "True or False", drop_last),
            (isinstance(split, bool), "split", "True or False", split),
            (is_number(timeout, 0), "timeout", "seconds from 0", timeout),
            (takes, "program", "a weft.Program", program),
            (collates, "collate_fn", "a function", collate_fn),
            (isinstance(sampler, Iterable | None), "sampler", "numbers of samples", sampler),
        )
        iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        if iterable and not isinstance(dataset, Iterable):
            raise wrong("weft.Loader: dataset", "a dataset with __getitem__ or __iter__", dataset)
        if iterable and (shuffle or sampler is not None or workers > 1):
            raise UserError(
                "weft.Loader: an iterable dataset is read in its own order, by one worker at most; leave out shuffle, "
                "sampler and more workers, or give a map-style dataset"
            )
        if lengths is not None and iterable:
            raise UserError(
                "weft.Loader: lengths takes a number for each sample of a map-style dataset, and this one is iterable; "
                "leave lengths out"
            )
        if shuffle and sampler is not None:
            raise UserError("weft.Loader: give shuffle or a sampler, not both")
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = 0
        self._step = self._loops = 0
        # For the epoch of `_step`; None if no loop over it has begun.
        self._samples: int | None = None
        self._program = program
        self._iterable = iterable
        self._shuffle, self._sampler, self._seed = shuffle, sampler, seed
        self._workers, self._ahead, self._timeout = workers, ahead, timeout
        self._collate = collate_fn or default_collate
        self._drop_last = drop_last
        self._split = split
        self._lengths = None if lengths is None else whole_numbers(lengths, "weft.Loader: lengths")

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self._iterable:
            raise TypeError("weft.Loader: an iterable dataset has no length")
        sized = self._sampler if self._sampler is not None else self.dataset
        return self._batches(len(sized) if isinstance(sized, Sized) else len(self._order()))

    def _batches(self, samples: int) -> int:
        full, rest = divmod(samples, self.batch_size)
        return full + bool(rest and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch that are still to come, none after its last one; then the next epoch begins."""
        return self._taken(None)

    def _taken(self, way: PrefetchedBatches | None) -> Iterator[Any]:
        """Like `__iter__`; `way` takes batches from the workers and cuts them ahead.

        The place of the loader is after the last batch that was asked for. Without workers none is loaded ahead,
        because samples and loop share the random number generators.
        """
        self._loops += 1
        loop = self._loops
        loading = self._streamed() if self._iterable else self._mapped()
        if way is not None and self._workers:
            rows = self._rows(self.batch_size)
            plan = way.plan(None if len(rows) == self.batch_size else rows)

            def cut(loaded: LoadedRows) -> LoadedRows:
                return loaded if loaded.error else replace(loaded, batch=way.cut(loaded.batch))

            loading = prefetched(loading, plan, cut, way.note)
        for loaded in loading:
            if loop != self._loops:
                raise UserError(
                    "weft.Loader: another loop over this loader has begun, or load_state_dict was called, so that "
                    "this loop cannot continue; begin a new loop, or make a second loader"
                )
            if loaded.error:
                raise UserError(f"weft.Loader: {loaded.error}")
            self._step += 1
            if not isinstance(loaded.batch, RowsOfBatch | CutBatch):
                mark_batch_whole(loaded.batch)
            yield loaded.batch
        self.epoch, self._step, self._samples = self.epoch + 1, 0, None

    def put_back(self) -> None:
        """Give the last batch once more, as where its step has failed, with the next loop over this loader."""
        self._step = max(0, self._step - 1)

    def state_dict(self) -> dict[str, int]:
        """The place of the next batch; it means the same to a loader on any number of ranks and workers."""
        state = {
            "epoch": self.epoch,
            "step": self._step,
            "seed": self._seed,
            "batch_size": self.batch_size,
            "shuffle": self._shuffle,
        }
        return state if self._samples is None else {**state, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of a `state_dict`, in the next loop over this loader.

        Raises:
            UserError: it is invalid, or from a loader with another seed, batch size or shuffle. The loop raises it
                where the state is in the middle of an epoch of more or fewer samples.
        """
        if not isinstance(state, Mapping):
            raise wrong("weft.Loader: load_state_dict: state", "what state_dict gave", state)
        # States of earlier versions say nothing of shuffle.
        state = {"shuffle": self._shuffle, **state}
        own_values = {"seed": self._seed, "batch_size": self.batch_size, "shuffle": self._shuffle}
        for name, own in own_values.items():
            if state.get(name) != own:
                raise UserError(
                    f"weft.Loader: the state is from a loader with {name}={state.get(name)!r}, this one has {own!r}; "
                    "make it with the same, so that the run sees each sample once"
                )
        for name in ("epoch", "step"):
            value = state.get(name)
            if not is_whole(value, 0):
                raise UserError(
                    f"weft.Loader: the state has {name}={value!r}, which must be a number from 0"
                )
        self.epoch, self._step = state["epoch"], state["step"]
        self._samples = state.get("samples")
        self._loops += 1  # one that is under way stands elsewhere

    @property
    def _by_rows(self) -> bool:
        return self._program is not None and self._program._core.setting.by_rows

    def _compared(self, rows: Sequence[int], size: int) -> bool:
        """True if a step does not compare batches of so many: samples are to be compared then."""
        several = self._program is not None and self._program._core.setting.world.several
        return several and (len(rows) < size or self._by_rows)

    def _part(self, loaded: LoadedRows, rows: Sequence[int], size: int, place: int) -> LoadedRows:
        if loaded.error or (len(rows) == size and not self._by_rows):
            return loaded
        return replace(loaded, batch=RowsOfBatch(loaded.batch, rows, size, place, loaded.sums))

    def _rows(self, size: int) -> Sequence[int]:
        if self._program is None or not self._split:
            return range(size)
        # One row says what rows are like where the ranks of this process take none.
        return self._program.rows(size) or [0]

    def _order(self) -> list[int]:
        order = order_of(self.dataset, self._sampler, self._shuffle, self._seed, self.epoch)
        if self._lengths is None:
            return order
        known = range(len(self._lengths))
        without = next((each for each in order if each not in known), None)
        if without is not None:
            raise UserError(
                f"weft.Loader: lengths has {len(known)} numbers, and the order sample {without}; give one for each "
                "sample"
            )
        mixes = self._shuffle or self._sampler is not None
        seed = mixed(self._seed, self.epoch, len(order)) if mixes else None
        return by_similar_lengths(order, self._lengths, self.batch_size, seed)

    def _mapped(self) -> Iterator[LoadedRows]:
        order, size = self._order(), self.batch_size
        if self._step > self._batches(len(order)):
            raise UserError(
                f"weft.Loader: the state is after {self._step} batches, and an epoch has "
                f"{self._batches(len(order))}; give the dataset that it is of"
            )
        if self._step and self._samples not in (None, len(order)):
            raise UserError(
                f"weft.Loader: the state is of an epoch of {self._samples} samples, and this one has {len(order)}, in "
                "another order; give the dataset that it is of, so that the run sees each sample once, or begin the "
                "next epoch with the new one"
            )
        self._samples = len(order)
        end = len(order) - size + 1 if self._drop_last else len(order)
        starts = range(self._step * size, end, size)
        sizes = [min(size, len(order) - start) for start in starts]
        rows = {each: self._rows(each) for each in dict.fromkeys(sizes)}
        wanted: list[tuple[int, list[int], list[int]]] = [
            (self.epoch, [order[start + row] for row in rows[each]], [])
            for start, each in zip(starts, sizes, strict=True)
        ]
        parted = (n for n, each in enumerate(sizes) if self._compared(rows[each], each))
        for first in islice(parted, 1):
            drawn = Random(mixed(self._seed, self.epoch))
            wanted[first][2].extend(drawn.sample(order, min(COMPARED, len(order))))
        source = Samples(self.dataset, self._collate, self._seed)
        place = mixed(self._seed, self.epoch)
        loading = self._loading(source, sampler=wanted)
        for start, each, loaded in zip(starts, sizes, loading, strict=True):
            samples = _checksum(place, order[start : start + each])
            yield self._part(loaded, rows[each], each, samples)

    def _streamed(self) -> Iterator[LoadedRows]:
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        rows = self._rows(self.batch_size)
        stream = Stream(
            *(self.dataset, self._collate, self.batch_size, rows, self._step, self._drop_last),
            mixed(self._seed, self.epoch),
            self._compared(rows, self.batch_size),
        )
        place, first = mixed(self._seed, self.epoch), self._step
        for number, (size, loaded) in enumerate(self._loading(stream), first):
            own = rows if size == self.batch_size else range(size)
            checksum = _checksum(place, [number, size, zlib.crc32(repr(loaded.sums).encode())])
            if number > first:  # named are those of the first batch
                loaded = replace(loaded, sums={})
            yield self._part(loaded, own, size, checksum)

    def _loading(self, source: Dataset[Any], **more: Any) -> Iterator[Any]:
        """Items of a source, by workers where there are any; a worker that has died is told."""
        if self._workers:
            more |= {"prefetch_factor": self._ahead, "worker_init_fn": begin_worker}
            more |= {"timeout": self._timeout}
        # Without a generator of its own, a DataLoader draws from that of torch.
        own = torch.Generator().manual_seed(self._seed)
        more |= {"num_workers": self._workers, "collate_fn": _unchanged, "generator": own}
        loading = DataLoader(source, batch_size=None, **more)
        try:
            yield from with_workers(loading) if self._workers else loading
        except (RuntimeError, EOFError, OSError) as error:
            # The last two are of what processes talk over: samples' own errors are items.
            of_torch = not isinstance(error, RuntimeError) or "DataLoader" in str(error)
            if not self._workers or not of_torch:
                raise
            if "timed out" in str(error):
                raise UserError(
                    f"weft.Loader: the workers gave no batch within timeout={loading.timeout} s; load with workers=0 "
                    "to see where they hang, or give a longer timeout"
                ) from error
            raise UserError(
                "weft.Loader: a worker process has ended; load with workers=0 to see why. If it could not send a "
                f"batch, its stderr says so: {HINT}: {error!r}"
            ) from error


def _checksum(place: int, numbers: Sequence[int]) -> int:
    return zlib.crc32(" ".join(map(str, numbers)).encode(), place & 0xFFFFFFFF)


def _unchanged(loaded: Any) -> Any:
    return loaded


def _number(name: str, value: Any, least: int | None = None) -> int:
    """An argument that is a whole number, of Python or numpy, from `least` on."""
    found = whole_number(value)
    if found is None or (least is not None and found < least):
        from_ = "" if least is None else f" from {least}"
        raise wrong(f"weft.Loader: {name}", f"a number{from_}", value)
    return found
