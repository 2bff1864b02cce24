"""A communicator as one of its ranks holds it: the few primitives that every collective is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

# The operation named when no larger one is.
EXCHANGE = "exchange"
# Bytes up to which a message costs its latency rather than its bytes.
SMALL = 2**16


class Channel(ABC):
    """One rank's end of a communicator. All ranks must call the same primitives in the same order.

    Attributes:
        device: of its tensors.
        sent: bytes that this rank has sent so far, by kind of exchange.
        running: the exchange that runs now: the kind of a collective, or one of the primitives below.
        while_waiting: called every `PATIENCE` seconds while an exchange waits for peers, but between
            GPUs. An error that it raises ends the wait.
        spins: true if a wait may look again and again for a moment before it sleeps: no other
            thread of this process has work meanwhile.
        interruptible: true if a wait ends at once when a rank fails or the user interrupts, in the main thread, too.
        checksum: of the step that runs (`weft.runtime.failures.call_log`); goes with messages, where the transport
            has room for it, and is compared with the receiver's. Elsewhere `compare` does.
    """

    interruptible = False

    def __init__(self, ranks: Sequence[int], index: int, device: torch.device) -> None:
        self.ranks = tuple(ranks)
        self.index = index
        self.device = device
        self.sent: Counter[str] = Counter()
        self.running = EXCHANGE
        self.while_waiting: Callable[[], None] = lambda: None
        self.spins = True
        self.checksum = 0
        # For what is joined into one message, and for what arrives.
        self._flat, self._arrived = Scratch(device), Scratch(device)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.ranks[self.index]

    @abstractmethod
    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        """Run an `exchange`, without the counting."""

    def exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        """Send contiguous tensors to peers and fill contiguous buffers from them.

        Args:
            sends: for every peer, what it gets, in order; what is at this rank's own place is ignored.
            receives: for every peer, buffers for what it sends here: same number, shapes and
                dtypes.
        """
        self.count(sends)
        self._exchange(sends, receives)

    def count(self, sends: Sequence[Sequence[Tensor]]) -> None:
        """Count what is sent to others as what runs."""
        self.sent[self.running] += sum(
            part.nbytes for peer, parts in enumerate(sends) if peer != self.index for part in parts
        )

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Wake all ranks that wait in this communicator, now or later, with a `RankFailure` that names `error`."""

    @abstractmethod
    def watch(self, fail: Callable[[BaseException], object]) -> None:
        """Have `fail` called when a rank fails that no wait of this rank would notice; only processes need it."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the communicator holds."""

    def compare(self) -> None:  # noqa: B027  # most transports have room for checksums
        """Compare a new checksum with those of peers, before a step sends anything, where messages have no room for
        it.
        """

    def all_reduce(self, tensors: Sequence[Tensor], reduction: str) -> None:
        """Reduce tensors over all ranks, in place; every rank gets the same bits.

        Args:
            reduction: one of `weft.layout.REDUCTIONS` (on booleans "sum" is "or" and "prod" is
                "and").
        """
        if self.size > 1:
            with self.counting("all_reduce"):
                self._all_reduce(tensors, reduction)

    def _all_reduce(self, tensors: Sequence[Tensor], reduction: str) -> None:
        """Slice by slice, each rank reduces a part and sends it to all; two ranks send each other little at once."""
        for views in in_slices(tensors):
            if self.size == 2 and sum(view.nbytes for view in views) <= SMALL:
                # Two ranks in one exchange: the bytes are the same, and there is one latency.
                came = self._arrived.places([each.numel() for each in views], views[0].dtype)
                self.exchange([views] * 2, [came] * 2)
                for own, other in zip(views, came, strict=True):
                    pair = (other, own) if self.index else (own, other)
                    reduce_into(own, pair, reduction)
            else:
                with joined(views, self._flat) as whole:
                    self._reduce_parts(parts_for(whole, self.size), reduction)

    def _reduce_parts(self, pieces: Sequence[Sequence[Tensor]], reduction: str) -> None:
        mine = pieces[self.index]
        buffers = arrivals(mine, self.index, self.size, self._arrived)
        with self.counting("reduce_scatter"):
            self.exchange(pieces, buffers)
        reduce_arrived(buffers, self.index, reduction)
        self.exchange([mine] * self.size, pieces)

    def reduce_scatter(self, pieces: Sequence[Sequence[Tensor]], reduction: str) -> list[Tensor]:
        """Reduce the pieces of rank `i` of all ranks on rank `i`, in the order of the ranks.

        Args:
            pieces: for every rank, contiguous tensors, as many for each; shapes may differ between
                the ranks that they are for, not between those that hold them.
            reduction: one of `weft.layout.REDUCTIONS`.

        Returns:
            Fresh tensors.
        """
        mine = pieces[self.index]
        if self.size == 1:
            return [piece.clone() for piece in mine]
        buffers = [list(map(torch.empty_like, mine)) for _ in range(self.size - 1)]
        buffers.insert(self.index, list(mine))
        with self.counting("reduce_scatter"):
            self.exchange(pieces, buffers)
        # The result takes the place of the first or the second that came from elsewhere.
        return [
            reduce_in_order(all_of_one, reduction, all_of_one[not self.index])
            for all_of_one in zip(*buffers, strict=True)
        ]

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of the rank at position `source`, on every rank; elsewhere `tensor` gives shape and dtype."""
        mine = (
            tensor.contiguous() if self.index == source else torch.empty_like(tensor).contiguous()
        )
        sends = [[mine] if self.index == source else [] for _ in self.ranks]
        receives = [[mine] if index == source else [] for index in range(self.size)]
        with self.counting("broadcast"):
            self.exchange(sends, receives)
        return mine

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Count what is sent meanwhile as `kind`, unless it is part of something else already."""
        outer = self.running
        self.running = kind if outer == EXCHANGE else outer
        try:
            yield
        finally:
            self.running = outer

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self.all_reduce([torch.zeros((), dtype=torch.int32, device=self.device)], "sum")

    def exchange_text(self, text: str) -> list[str]:
        """The texts of all ranks, in the communicator's order."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        length = torch.tensor([data.numel()], device=self.device)
        lengths = [torch.zeros_like(length) for _ in self.ranks]
        self.exchange([[length]] * self.size, [[buffer] for buffer in lengths])
        lengths[self.index] = length
        texts = [data.new_empty(int(length)) for length in lengths]
        self.exchange([[data]] * self.size, [[buffer] for buffer in texts])
        texts[self.index] = data
        return [bytes(part.tolist()).decode() for part in texts]


def reduce_in_order(
    tensors: Sequence[Tensor], reduction: str, into: Tensor | None = None
) -> Tensor:
    """Reduce tensors of one shape from first to last.

    Args:
        into: the first or the second of them, to be overwritten; without it, or where that cannot
            be, the result is a fresh tensor.
    """
    dtype = tensors[0].dtype
    if dtype in SIGNED:
        # With its first bit turned, an unsigned integer has its place in the order of the signed
        # ones.
        turned = torch.iinfo(SIGNED[dtype]).min if reduction in ("max", "min") else 0
        signed = [tensor.view(SIGNED[dtype]) ^ turned for tensor in tensors]
        return (reduce_in_order(signed, reduction) ^ turned).view(dtype)
    combine = COMBINE[reduction]
    if into is None:
        total = tensors[0].clone()
    else:
        total, tensors = combine(tensors[0], tensors[1], out=into), tensors[1:]
    for tensor in tensors[1:]:
        combine(total, tensor, out=total)
    return total


def reduce_into(place: Tensor, tensors: Sequence[Tensor], reduction: str) -> None:
    """Reduce tensors from first to last; `place` gets the result, and may be one of them."""
    first = any(place is tensor for tensor in tensors[:2])
    made = reduce_in_order(tensors, reduction, place if first else None)
    if made is not place:
        place.copy_(made)


def arrivals(
    mine: Sequence[Tensor], index: int, size: int, scratch: Scratch
) -> list[Sequence[Tensor]]:
    """For each of `size` ranks, places for what it sends of the parts of rank `index`: there `mine` itself."""
    places = scratch.places([piece.numel() for piece in mine] * (size - 1), mine[0].dtype)
    others = range(0, len(places), len(mine))
    found: list[Sequence[Tensor]] = [places[start : start + len(mine)] for start in others]
    found.insert(index, mine)
    return found


def reduce_arrived(arrived: Sequence[Sequence[Tensor]], index: int, reduction: str) -> None:
    """Reduce what has arrived from all ranks into the parts of rank `index`."""
    for of_ranks in zip(*arrived, strict=True):
        of_ranks[index].copy_(reduce_in_order(of_ranks, reduction, of_ranks[not index]))


def parts_for(tensors: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """For each of `size` ranks, a part of every contiguous tensor."""
    split = [tensor.view(-1).tensor_split(size) for tensor in tensors]
    return [[parts[index] for parts in split] for index in range(size)]


@contextmanager
def joined(tensors: Sequence[Tensor], scratch: Scratch) -> Iterator[list[Tensor]]:
    """The tensors, the small ones as a single one in a scratch; they hold afterwards what it holds."""
    small = [tensor for tensor in tensors if tensor.nbytes <= SMALL]
    if len(small) < 2:
        yield list(tensors)
        return
    sizes = [tensor.numel() for tensor in small]
    (flat,) = scratch.places([sum(sizes)], small[0].dtype)
    torch.cat([tensor.view(-1) for tensor in small], out=flat)
    yield [*(tensor for tensor in tensors if tensor.nbytes > SMALL), flat]
    for tensor, part in zip(small, flat.split_with_sizes(sizes), strict=True):
        tensor.copy_(part.view(tensor.shape))


COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}

# Dtypes without sums and extrema in torch, with a dtype of equal size that has them.
SIGNED: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


# Bytes that are reduced at a time: large enough for the links, small beside a model.
SLICE = 4 * 2**20
# Where the places in a buffer begin.
_ALIGNED = 16


@final
class Scratch:
    """Buffers that are made when more is needed than ever before, and kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []

    def places(self, counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Tensors of so many elements each, whose content is anything; they hold until the next call."""
        lengths = [-(-count * dtype.itemsize // _ALIGNED) * _ALIGNED for count in counts]
        total = sum(lengths)
        if not self._buffers or self._buffers[-1].numel() < total:
            # Twice as much as before at least, so that all of them together are small beside the last.
            more = max(total, 2 * self._buffers[-1].numel()) if self._buffers else total
            self._buffers.append(torch.empty(more, dtype=torch.uint8, device=self._device))
        pieces = self._buffers[-1][:total].split_with_sizes(lengths)
        return [
            piece[: count * dtype.itemsize].view(dtype)
            for piece, count in zip(pieces, counts, strict=True)
        ]


def in_slices(tensors: Sequence[Tensor], most: int = SLICE) -> Iterator[list[Tensor]]:
    """Flat views of contiguous tensors of one dtype, all their elements in order, at most so many bytes at a time."""
    views: list[Tensor] = []
    room = most
    for tensor in tensors:
        flat, start = tensor.view(-1), 0
        while start < flat.numel():
            count = min(room // flat.itemsize, flat.numel() - start)
            views.append(flat[start : start + count])
            start, room = start + count, room - count * flat.itemsize
            if room < flat.itemsize:
                yield views
                views, room = [], most
    if views:
        yield views
