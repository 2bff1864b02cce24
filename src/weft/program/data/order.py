"""The order of samples: a function of seed and epoch alone, whatever loads them and wherever."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager, suppress
from itertools import accumulate, chain, islice
from operator import index
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from weft.errors import UserError, shown, wrong


def whole_number(value: Any) -> int | None:
    """A whole number as Python has it; None for anything else, truth values among it."""
    if isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return index(value)
    except (TypeError, RuntimeError):  # of torch, for what has no values
        return None


def whole_numbers(given: Any, where: str) -> list[int]:
    """Whole numbers from 0, of a list, an array or a tensor of one dimension; raises UserError, naming what is none."""
    # Of sets nobody knows the order.
    every = None if isinstance(given, str | bytes | Mapping | Set) else given
    if isinstance(given, Tensor) and (given.layout != torch.strided or given.is_meta):
        every = None
    elif isinstance(given, np.ndarray | Tensor):
        every = list(given.tolist()) if given.ndim == 1 else None
    if not isinstance(every, Iterable):
        expected = "whole numbers from 0, one for each, as a list or an array of one dimension"
        raise wrong(where, expected, given)
    found: list[int] = []
    for place, each in enumerate(every):
        number = whole_number(each)
        if number is None or number < 0:
            expected = "whole numbers from 0, one for each"
            got = f"{shown(each)}, a {type(each).__name__}, at place {place}"
            raise UserError(f"{where} must be {expected}, got {got}")
        found.append(number)
    return found


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
    """The numbers of the samples of an epoch, in an order that `seed` and `epoch` decide.

    A sampler gives the numbers, and draws by seed and epoch too; without one, `shuffle` makes a permutation.
    """
    if sampler is not None:
        if iter(sampler) is sampler:
            raise UserError(
                f"weft.Loader: the sampler, a {type(sampler).__name__}, can be iterated only once; give a sampler "
                "that can be iterated in each epoch"
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


def by_similar_lengths(
    order: Sequence[int], lengths: Sequence[int], size: int, seed: int | None
) -> list[int]:
    """The same samples, so that those of a batch have lengths alike, and little of it is padding.

    Runs of some batches are put in order of their lengths; the samples of a last, shorter batch stay where they are.
    `seed` shuffles the batches; None leaves them, the longest of a run first.
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
    most = max(_LONGEST, _TIMES * len(dataset) if isinstance(dataset, Sized) else 0)
    if isinstance(sampler, Sized):
        with suppress(TypeError, NotImplementedError):  # some have the method alone
            most = max(most, len(sampler))
    found: list[int] = []
    for each in islice(sampler, most + 1):
        number = whole_number(each)
        if number is None:
            raise UserError(
                f"weft.Loader: the sampler, a {type(sampler).__name__}, gives {shown(each)}; it must give numbers of "
                "samples, one at a time"
            )
        found.append(number)
    if len(found) > most:
        raise UserError(
            f"weft.Loader: the sampler, a {type(sampler).__name__}, has given {most} numbers and does not end; "
            "expected a sampler that ends with the epoch: itertools.islice cuts an endless sampler"
        )
    return found


@contextmanager
def drawn_by(seed: int) -> Iterator[None]:
    """All generators of Python, numpy and torch on the CPU begin at a seed, and continue afterwards where they were."""
    with preserve_generators():
        draw_by(seed)
        yield


@contextmanager
def preserve_generators() -> Iterator[None]:
    """All generators of Python, numpy and torch on the CPU continue afterwards where they were.

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


@final
class Packed(Dataset[dict[str, Tensor]]):
    """Texts of many lengths packed into rows of one length, without padding, so that one plan is enough.

    Row i holds tokens i · `length` to (i + 1) · `length` of all texts in order; an incomplete
    last row is left out. A row is a dict of int64[length]: "tokens"; "text", the number of the text of each;
    "position", its place there. To keep attention within a text, compare "text" of query and key.

    Args:
        texts: map-style: each a tensor [n] or a list of tokens, or a mapping with one under `key`.
        length: tokens of a row.
        lengths: tokens of each text; by default each text is loaded once to count them.
        key: where the tokens are in a text that is a mapping.

    Raises:
        UserError: an argument is invalid; when a row is read, a text that has another length.
    """

    def __init__(
        self,
        texts: Any,
        length: int,
        *,
        lengths: Iterable[int] | None = None,
        key: str = "input_ids",
    ) -> None:
        tokens = whole_number(length)
        if tokens is None or tokens < 1:
            raise wrong("weft.Packed: length", "a number of tokens from 1", length)
        if not hasattr(texts, "__getitem__") or not hasattr(texts, "__len__"):
            raise wrong("weft.Packed: texts", "a dataset with __getitem__ and __len__", texts)
        self._texts, self._length, self._key = texts, tokens, key
        if lengths is None:
            lengths = [len(self._tokens(number)) for number in range(len(texts))]
        every = whole_numbers(lengths, "weft.Packed: lengths")
        if len(every) != len(texts):
            expected = f"a number of tokens for each of the {len(texts)} texts"
            raise wrong("weft.Packed: lengths", expected, every)
        # Where each text ends, of all tokens.
        self._ends = list(accumulate(every))

    def __len__(self) -> int:
        """Rows."""
        return self._ends[-1] // self._length if self._ends else 0

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """A row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is out of range: there are {len(self)}")
        at, end = row * self._length, (row + 1) * self._length
        parts: list[tuple[Tensor, int, int]] = []
        while at < end:
            text = bisect_right(self._ends, at)
            begin = self._ends[text - 1] if text else 0
            tokens, first = self._tokens(text), at - begin
            if len(tokens) != self._ends[text] - begin:
                raise UserError(
                    f"weft.Packed: text {text} has {len(tokens)} tokens, and lengths says {self._ends[text] - begin}; "
                    "give the lengths of these texts, or none"
                )
            taken = min(end, self._ends[text]) - at
            parts.append((tokens[first : first + taken], text, first))
            at += taken
        return {
            "tokens": torch.cat([tokens for tokens, _, _ in parts]),
            "text": torch.cat([torch.full((len(x),), text) for x, text, _ in parts]),
            "position": torch.cat([torch.arange(first, first + len(x)) for x, _, first in parts]),
        }

    def _tokens(self, number: int) -> Tensor:
        try:
            text = self._texts[number]
            found = torch.as_tensor(text[self._key] if hasattr(text, "keys") else text)
        except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
            raise UserError(
                f"weft.Packed: text {number} must be a row of tokens, got an error: {type(error).__name__}: {error}"
            ) from None
        if found.dim() != 1 or (found.is_floating_point() and len(found)):
            raise UserError(
                f"weft.Packed: text {number} is {found.dtype}{list(found.shape)}; expected a row of tokens, or a "
                f"mapping with one under {self._key!r}"
            )
        return found.to(torch.int64)
