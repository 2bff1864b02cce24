"""The order of samples: a function of seed and epoch alone, whatever loads them and wherever."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from weft.errors import UserError, shown
from weft.program.data.whole import whole_number

# Batches of which samples are put in order of their lengths.
RUN = 32
# A sampler has an end if it gives no more numbers than these, or so many times the samples of the dataset.
_LONGEST, _TIMES = 2**20, 64
# Bits of a seed that torch, numpy and Python's random all take.
_BITS = 32


def mixed(*numbers: int) -> int:
    """A seed for some numbers, the same on all machines."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=_BITS // 8).digest(), "big")


def order_of(
    dataset: Any, sampler: Iterable[int] | None, shuffle: bool, seed: int, epoch: int
) -> list[int]:
    """The numbers of the samples of an epoch, in order.

    Args:
        dataset: with a length.
        sampler: gives the numbers; what it draws from torch's generators is drawn by seed and epoch.
        shuffle: True for a permutation.
        seed, epoch: decide it.
    """
    if sampler is not None:
        if iter(sampler) is sampler:
            raise UserError(
                f"weft.Loader: the sampler, a {type(sampler).__name__}, gives its numbers once; give one that can be "
                "looped over in each epoch"
            )
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(mixed(seed, epoch))
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        with drawn_by(mixed(seed, epoch)):
            return _numbers(dataset, sampler)
    if not isinstance(dataset, Sized):
        raise UserError(
            f"weft.Loader: the dataset, a {type(dataset).__name__}, has no length; give it __len__, or a sampler"
        )
    if not shuffle:
        return list(range(len(dataset)))
    generator = torch.Generator().manual_seed(mixed(seed, epoch))
    found: list[int] = torch.randperm(len(dataset), generator=generator).tolist()
    return found


def of_like_lengths(
    order: Sequence[int], lengths: Sequence[int], size: int, seed: int | None
) -> list[int]:
    """The same samples, so that those of a batch have lengths alike, and little of it is padding.

    Runs of some batches are put in order of their lengths; what is left for a last, shorter batch stays where it is.

    Args:
        order: numbers of samples.
        lengths: of all samples.
        size: of a batch.
        seed: of the order of batches; None leaves them as they are, the longest of a run first.
    """
    full = len(order) - len(order) % size
    batches: list[list[int]] = []
    for start in range(0, full, RUN * size):
        run = sorted(order[start : min(full, start + RUN * size)], key=lambda n: -lengths[n])
        batches += [run[at : at + size] for at in range(0, len(run), size)]
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        batches = [batches[n] for n in torch.randperm(len(batches), generator=generator).tolist()]
    return [*chain.from_iterable(batches), *order[full:]]


def _numbers(dataset: Any, sampler: Iterable[int]) -> list[int]:
    """The numbers that a sampler gives; one that never ends is refused."""
    most = max(_LONGEST, _TIMES * len(dataset) if isinstance(dataset, Sized) else 0)
    if isinstance(sampler, Sized):
        with suppress(TypeError, NotImplementedError):  # some have the method alone
            most = max(most, len(sampler))
    found = [_number(each, sampler) for each in islice(sampler, most + 1)]
    if len(found) > most:
        raise UserError(
            f"weft.Loader: the sampler, a {type(sampler).__name__}, has given {most} numbers and goes on; expected one "
            "that ends with the epoch, as itertools.islice makes of one that does not"
        )
    return found


def _number(each: Any, sampler: Any) -> int:
    found = whole_number(each)
    if found is None:
        raise UserError(
            f"weft.Loader: the sampler, a {type(sampler).__name__}, gives {shown(each)}; it must give numbers of "
            "samples, one at a time"
        )
    return found


@contextmanager
def drawn_by(seed: int) -> Iterator[None]:
    """All generators of Python, numpy and torch on the CPU begin at a seed, and go on afterwards where they were."""
    with generators_kept():
        draw_by(seed)
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """All generators of Python, numpy and torch on the CPU go on afterwards where they were.

    Takes ten times as long as `draw_by`: what is drawn by many seeds in turn has one around all.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def draw_by(seed: int) -> None:
    """Have all generators of Python, numpy and torch on the CPU begin at a seed."""
    random.seed(seed)
    np.random.seed(seed)
    # Not `manual_seed`, which would seed the devices' generators too.
    torch.default_generator.manual_seed(seed)
