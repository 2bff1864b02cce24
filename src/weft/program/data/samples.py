"""Samples loaded by workers: random numbers depend on the sample's number, and errors name the sample.

Where each process loads its rows of a batch, no batch shows that the rows are of another order of the dataset than
those of the others. So all load a few samples alike, and compare their checksums; of an iterable dataset, all of it.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from multiprocessing import get_start_method, queues, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from weft.capture.batch import is_dense
from weft.capture.tree import flatten
from weft.errors import UserError
from weft.files import users_file
from weft.program.agreement import differences
from weft.program.checksums import array_checksum, batch_checksums
from weft.program.data.order import draw_by, mixed, preserve_generators
from weft.runtime.world.launch import ending_signals

# For each sample, or batch of them, the checksum of every leaf; None for what is another one each time it is loaded.
Sums: TypeAlias = "Mapping[str, dict[str, int | None] | None]"


def sums_of(samples: Any) -> dict[str, int | None]:
    """The checksum of every leaf."""
    return {key: _checksum(leaf) for key, leaf in flatten(samples, "it")[0]}


def stable_checksums(load: Callable[[], Any]) -> dict[str, int | None] | None:
    """The checksums of a sample that is loaded twice; None for leaves that differ, such as those with random numbers of
    another generator.

    None for a sample that cannot be loaded: the step that needs it reports the error.
    """
    try:
        one, other = sums_of(load()), sums_of(load())
    except Exception:
        return None
    return {key: each if other.get(key) == each else None for key, each in one.items()}


def check_same(every: list[str]) -> None:
    """Raise UserError, naming the first sample that differs, unless all ranks, each by JSON, have loaded the same."""
    for rank, first, other in differences(every):
        if first.keys() != other.keys():
            raise UserError(
                f"weft.Loader: the loaders of rank 0 and rank {rank} would load different samples next, "
                f"{', '.join(first)} and "
                f"{', '.join(other)}; give a loader the same seed, sampler, batch_size and place in all processes"
            )
        every_leaf = (
            (name, key, (first[name] or {}).get(key, 0), (other[name] or {}).get(key, 0))
            for name in first
            if first[name] is not None and other[name] is not None
            for key in {**first[name], **other[name]}
        )
        for name, key, one, two in every_leaf:
            if one == two or one is None or two is None:
                continue
            leaf = "content" if key == "it" else f"leaf {key!r}"
            raise UserError(
                f"weft.Loader: the dataset is not the same in all processes: {name} has another {leaf} on rank "
                f"{rank} than on rank 0. A loader takes the whole dataset in each process, and gives each its rows: do "
                "not split it by rank, list files in one order (sorted), shuffle and draw by one seed. Where each "
                'process has data of its own, give them by a torch.utils.data.DataLoader to a program of batch="local"'
            )


def _checksum(leaf: Any) -> int:
    """The checksum of a tensor, an array (images have one), a number or a text; of any other object, of its type."""
    if isinstance(leaf, Tensor) and is_dense(leaf) and leaf.device.type == "cpu":
        return batch_checksums({"": leaf}, {}, 0).whole
    if hasattr(leaf, "__array_interface__"):
        values = np.asarray(leaf)
        if not values.dtype.hasobject:
            return array_checksum(values, 0, 0)
    text = type(leaf).__name__
    if leaf is None or isinstance(leaf, bool | int | float | complex):
        text = repr(leaf)
    elif isinstance(leaf, str | bytes):
        # The folder of a file may be another one on each host.
        text = str(leaf).rpartition("/")[2]
    return zlib.crc32(text.encode(errors="surrogatepass"))


@final
@dataclass(frozen=True)
class LoadedRows:
    """Collated rows of a batch, or the error of one of its samples, in words.

    `sums` are those of samples that all processes have loaded, where they are to be compared.
    """

    batch: Any
    error: str = ""
    sums: Sums = field(default_factory=dict)


@final
class Samples(Dataset[LoadedRows]):
    """Rows of batches, by the numbers of their samples, which draw by `seed`, their numbers and the epoch."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, rows: tuple[int, Sequence[int], Sequence[int]]) -> LoadedRows:
        """The rows of some numbers in an epoch; and the checksums of samples that are to be compared."""
        epoch, numbers, compared = rows
        found = []
        with preserve_generators():
            sums = {
                f"sample {each}": stable_checksums(partial(self._sample, epoch, each))
                for each in compared
            }
            for number in numbers:
                try:
                    found.append(self._sample(epoch, number))
                except Exception as error:
                    return LoadedRows(None, f"sample {number}: {_said(error)}")
            draw_by(mixed(self._seed, epoch, numbers[0], len(numbers)))
            what = f"samples {numbers[0]} to {numbers[-1]}"
            return replace(collated(self._collate, found, what), sums=sums)

    def _sample(self, epoch: int, number: int) -> Any:
        draw_by(mixed(self._seed, epoch, number))
        return self._dataset[number]


@final
class Stream(IterableDataset[tuple[int, LoadedRows]]):
    """Rows of the batches of an iterable dataset, which is read in order, and draws by `seed`.

    Each batch of `size` samples gives its `rows`, after `skipped` batches; `compared`: with checksums of all samples.
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
        compared: bool = False,
    ) -> None:
        self._dataset, self._collate, self._size = dataset, collate, size
        self._rows, self._skipped, self._drop_last = rows, skipped, drop_last
        self._seed, self._compared = seed, compared

    def __iter__(self) -> Iterator[tuple[int, LoadedRows]]:
        source = self._drawn()
        for number in count():
            with preserve_generators():
                found = self._batch(source, number)
            if found is None:
                if number < self._skipped:
                    yield (
                        0,
                        LoadedRows(
                            None,
                            f"the state is after {self._skipped} batches, and the dataset has given {number}; give "
                            "the dataset that it is of, or begin the next epoch",
                        ),
                    )
                return
            if found[1].error or number >= self._skipped:
                yield found
            if found[1].error:
                return

    def _batch(self, source: Iterator[Any], number: int) -> tuple[int, LoadedRows] | None:
        """The samples of a batch, how many; none of one that is passed over. None after the last one."""
        try:
            samples = list(islice(source, self._size))
        except Exception as error:
            return 0, LoadedRows(None, f"sample {number * self._size} or after it: {_said(error)}")
        if not samples or (self._drop_last and len(samples) < self._size):
            return None
        if number < self._skipped:
            return len(samples), LoadedRows(None)
        short = len(samples) < self._size
        own = samples if short else [samples[row] for row in self._rows]
        sums = {f"batch {number}": sums_of(samples)} if self._compared else {}
        draw_by(mixed(self._seed, number + 1, len(own)))
        return len(samples), replace(collated(self._collate, own, f"batch {number}"), sums=sums)

    def _drawn(self) -> Iterator[Any]:
        """The samples; each draws by its number, and the generators are left as they are then."""
        draw_by(mixed(self._seed))
        source = iter(self._dataset)
        for number in count():
            draw_by(mixed(self._seed, number))
            try:
                sample = next(source)
            except StopIteration:
                return
            yield sample


def collated(collate: Callable[[list[Any]], Any], samples: list[Any], what: str) -> LoadedRows:
    """Samples as a batch; the error that `collate` raises, with what they are."""
    try:
        return LoadedRows(collate(samples))
    except Exception as error:
        return LoadedRows(None, f"{what}: they cannot be collated: {_said(error)}")


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    own = [each for each in traceback.extract_tb(error.__traceback__) if users_file(each.filename)]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text


# Why processes of a host cannot send each other batches.
HINT = "it needs room in /dev/shm that it may write to, and a TMPDIR of less than 70 characters"
_NO_ROOM = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSYS)
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# For all loops, and the process that they load for.
_workers: WeakKeyDictionary[BaseProcess, int] = WeakKeyDictionary()


def begin_worker(_number: int) -> None:
    """Called in each worker at its beginning, where the signals are blocked."""
    # No handler of the system's: what a worker starts would pass them over, too.
    for number in ending_signals():
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    # A batch that cannot be sent would be dropped there, and waited for.
    queues.Queue._on_queue_feeder_error = staticmethod(_cannot_send)  # type: ignore[attr-defined]


def with_workers(loading: Iterable[Any]) -> Iterator[Any]:
    """An iterator of a `DataLoader` with workers, which end where it tells them; UserError where none can start."""
    # A worker that is spawned imports modules before it begins, and one that is forked may be by a server.
    if get_start_method() != "fork":
        resource_tracker.ensure_running()  # which, where it begins later, unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        iterator = iter(loading)
    except OSError as error:
        why = f"; {HINT}" if error.errno in _NO_ROOM else ""
        raise UserError(
            f"weft.Loader: the worker processes cannot be started: {error!r}{why}; repair that, or load with workers=0"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for worker in getattr(iterator, "_workers", ()):
        worker.terminate = worker.kill
        _workers[worker] = os.getpid()
    return iterator


# Before the call of `multiprocessing`, which was registered first: it asks those that run to end, and waits for them.
@atexit.register
def _end_all() -> None:
    left = [each for each, by in _workers.items() if by == os.getpid() and each.is_alive()]
    if left:
        # torch raises when a worker is killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in left:
        worker.kill()


def _cannot_send(_error: Exception, _batch: Any) -> None:
    """Called by the thread of a worker that sends; the process that waits sees the worker end."""
    traceback.print_exc()
    os._exit(1)
