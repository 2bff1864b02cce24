"""Checksums of all that ranks must hold alike in a step: the batch, tensors outside the model, hyperparameters."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from weft.capture.optimizer_groups import Optimizing, optimizers_of
from weft.capture.optimizers.attributes import check_hyperparameters
from weft.capture.optimizers.trials import KeptStates
from weft.errors import wrong
from weft.layout import Broadcast, Layout
from weft.runtime.failures.call_log import StepChecksum
from weft.tensor import GlobalTensor
from weft.tensor.divergence import written_among

# Elements of a leaf that are looked at in every step.
_SAMPLED = 64
# The first element of the sample moves by so many elements in a step; a prime, so that it comes everywhere.
_STRIDE = 7919
# All of a leaf is looked at in the first steps, and then once in a while, when it is not larger.
_FIRST, _EVERY, _BYTES = 4, 16, 2**22


@final
@dataclass(frozen=True)
class BatchChecksums:
    """Checksums of a batch.

    Attributes:
        whole: of the leaves that every process passes whole.
        parts: for each leaf of which processes give parts, its layout, and the checksum of what
            this process has of it.
    """

    whole: int = 0
    parts: tuple[tuple[Layout, int], ...] = ()

    def alike(self, ranks: tuple[int, ...]) -> int:
        """The checksum of values that must be equal on some ranks."""
        found = self.whole
        for layout, checksum in self.parts:
            if _alike(layout, ranks):
                found = zlib.crc32(checksum.to_bytes(4, "big"), found)
        return found


@cache
def _alike(layout: Layout, ranks: tuple[int, ...]) -> bool:
    """True if some ranks have the same of a tensor: they differ along axes alone where it is Broadcast."""
    places = layout.placement.coordinates
    if not places.keys() >= set(ranks):
        return False
    along = zip(layout.sbp, *(places[rank] for rank in ranks), strict=True)
    return all(isinstance(sbp, Broadcast) or len({*each}) == 1 for sbp, *each in along)


@final
@dataclass(frozen=True)
class StepChecksums:
    """The checksums of a step, one for each group of ranks that talk to each other."""

    sums: BatchChecksums
    options: int
    call: int

    def among(self, ranks: tuple[int, ...]) -> int:
        """The checksum of messages between some ranks."""
        written = written_among(ranks)
        return int(StepChecksum(self.sums.alike(ranks), written, self.options, self.call))


def batch_checksums(
    leaves: Mapping[str, Tensor],
    given: Mapping[str, GlobalTensor],
    step: int,
    samples: int | None = None,
    parts: Iterable[tuple[Layout, Tensor]] = (),
) -> BatchChecksums:
    """The checksums of a batch, of a sample of each leaf in most steps; some microseconds a leaf.

    Args:
        leaves: that every process gives whole, by key.
        given: leaves that are global tensors.
        step: since the program was compiled or has loaded.
        samples: a number of 32 bits that every process gives, too.
        parts: this process's parts of other leaves, with their layouts.
    """
    whole = checksums(leaves.values(), step)
    if samples is not None:
        whole = zlib.crc32(samples.to_bytes(4, "big"), whole)
    found = [(x.spec.layout, checksums(x.shards().values(), step)) for x in given.values()]
    found += [(layout, _checksum(part, step, 0)) for layout, part in parts]
    return BatchChecksums(whole, tuple(found))


def checksums(tensors: Iterable[Tensor], step: int, before: int = 0) -> int:
    """The checksum of some tensors, carried on."""
    for tensor in tensors:
        before = _checksum(tensor, step, before)
    return before


def _checksum(leaf: Tensor, step: int, before: int) -> int:
    """A checksum carried on; tensors on devices count once in a while only, as the host has to wait for them."""
    if leaf.device.type == "cpu":
        return array_checksum(_values(leaf), step, before)
    if not is_checked_step(step):
        return before
    sample = _sample(tuple(leaf.shape), leaf.nbytes, step)
    return zlib.crc32(_values(leaf[sample]).tobytes(), before)


def array_checksum(values: Any, step: int, before: int) -> int:
    """A checksum of an array of numpy carried on, of a sample of its elements in most steps."""
    return zlib.crc32(values[_sample(values.shape, values.nbytes, step)].tobytes(), before)


def is_checked_step(step: int) -> bool:
    """True in the first steps, and in one of some."""
    return step < _FIRST or step % _EVERY == 0


def _sample(shape: tuple[int, ...], size: int, step: int) -> tuple[slice, ...]:
    """The elements of so many bytes that count in a step; none named, all of them."""
    if is_checked_step(step) and size <= _BYTES:
        return ()
    # For each dimension as many as there is room for.
    return tuple(slice(step * _STRIDE % each, None, each) for each in _strides(shape))


def checksum_of_numbers(numbers: Iterable[float]) -> int:
    """The checksum of Python numbers that a step reads; 0 if there are none."""
    return zlib.crc32(" ".join(map(repr, numbers)).encode())


@final
class OptionsChecksum:
    """The checksum of the optimizers' hyperparameters; tensors on devices count by their kind."""

    def __init__(self, optimizer: Optimizing) -> None:
        self._optimizers = optimizers_of(optimizer)
        self._known: tuple[list[Any], int] = ([], 0)
        self._kept = KeptStates(self._optimizers)

    def of(self, update: bool) -> int:
        """The checksum for a step.

        Raises:
            UserError: naming a hyperparameter that is not a number, or by which updates keep other states;
                `update` is not a truth value.
        """
        if update is not True and update is not False:
            expected = "True or False"
            remedy = "a step takes one batch, which the loss function gets as it is: program.step((x, y))"
            raise wrong("update=", expected, update, remedy=remedy)
        groups = [group for one in self._optimizers.each for group in one.param_groups]
        now = [_number(x) for group in groups for name, x in group.items() if name != "params"]
        if now != self._known[0]:
            check_hyperparameters(self._optimizers)
            self._kept.check()
            text = ", ".join(map(_text, now))
            self._known = now, zlib.crc32(text.encode())
        return self._known[1] ^ update


def _number(value: Any) -> Any:
    """The value to compare: of a tensor its number, where the host need not wait for it; of a list a copy."""
    if isinstance(value, tuple | list):
        return tuple(map(_number, value))
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.device.type == "cpu" and value.numel() == 1 else type(value)


def _text(value: Any) -> str:
    """A value, or its kind where its text would differ from process to process."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if plain else type(value).__name__


@cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    room, found = _SAMPLED, []
    for size in shape:
        count = max(1, min(size, room))
        room = max(1, room // count)
        found.append(max(1, size // count))
    return tuple(found)


def _values(leaf: Tensor) -> Any:
    """A tensor as an array of numpy, which is faster to cut; of other dtypes that it does not have, the bits."""
    leaf = leaf.detach().cpu().resolve_conj().resolve_neg()
    try:
        return leaf.numpy()
    except TypeError:
        return leaf.view(torch.int16 if leaf.itemsize == 2 else torch.uint8).numpy()
