"""A communicator as one of its ranks holds it: the few primitives that every collective is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.errors import RankFailure

# What runs when no larger operation says so.
EXCHANGE = "exchange"


class Channel(ABC):
    """One rank's end of a communicator. All ranks must call the same primitives in the same order.

    Attributes:
        ranks: the communicator's ranks, in its order.
        index: position of this rank among them.
        device: where the tensors are that it takes.
        sent: bytes that this rank has sent to others so far, by what ran.
        running: what runs now: the kind of a collective, or one of the primitives below.
        while_waiting: called every `PATIENCE` seconds while an exchange waits for peers, where that
            can be told: between processes of one host. What it raises ends the wait.
    """

    def __init__(self, ranks: Sequence[int], index: int, device: torch.device) -> None:
        self.ranks = tuple(ranks)
        self.index = index
        self.device = device
        self.sent: Counter[str] = Counter()
        self.running = EXCHANGE
        self.while_waiting: Callable[[], None] = _nothing

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
        """What `exchange` does, without the counting."""

    def exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        """Send contiguous tensors to peers and fill contiguous buffers from them.

        Args:
            sends: for every peer, what it gets, in order; what stands at this rank's own place is
                ignored.
            receives: for every peer, buffers for what it sends here: same number, shapes and
                dtypes.
        """
        self.sent[self.running] += sum(
            part.nbytes for peer, parts in enumerate(sends) if peer != self.index for part in parts
        )
        self._exchange(sends, receives)

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Wake all ranks that wait in this communicator, now or later, with a `RankFailure` that names `error`."""

    @abstractmethod
    def watch(self, fail: Callable[[BaseException], object]) -> None:
        """Have `fail` called when a rank fails that no wait of this rank would notice; only processes need it."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the communicator holds."""

    def all_reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """Reduce a contiguous tensor over all ranks; every rank gets the same bits. May overwrite `tensor`.

        Each rank reduces one piece and sends it to all. Two ranks send each other everything, in
        one exchange: the bytes are the same.

        Args:
            tensor: any shape and dtype, the same on all ranks.
            reduction: one of `weft.layout.REDUCTIONS` (on booleans "sum" is "or" and "prod" is
                "and").
        """
        with self.counting("all_reduce"):
            if self.size == 2:
                return self.reduce_scatter([tensor] * self.size, reduction)
            pieces = list(tensor.view(-1).tensor_split(self.size))
            mine = self.reduce_scatter(pieces, reduction)
            pieces[self.index].copy_(mine)
            self.exchange([[mine]] * self.size, [[piece] for piece in pieces])
        return tensor

    def reduce_scatter(self, pieces: Sequence[Tensor], reduction: str) -> Tensor:
        """Reduce piece `i` of all ranks on rank `i`, in the order of the ranks.

        Args:
            pieces: one contiguous tensor for every rank; shapes may differ between pieces, not
                between ranks.
            reduction: one of `weft.layout.REDUCTIONS`.
        """
        mine = pieces[self.index]
        if self.size == 1:
            return mine.clone()
        buffers = [torch.empty_like(mine) for _ in range(self.size - 1)]
        buffers.insert(self.index, mine)
        with self.counting("reduce_scatter"):
            self.exchange([[piece] for piece in pieces], [[buffer] for buffer in buffers])
        return reduce_in_order(buffers, reduction, buffers[not self.index])

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
        self.all_reduce(torch.zeros((), dtype=torch.int32, device=self.device), "sum")

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


def _nothing() -> None:
    pass


def reduce_in_order(
    tensors: Sequence[Tensor], reduction: str, into: Tensor | None = None
) -> Tensor:
    """Reduce tensors of one shape from first to last.

    Args:
        tensors: at least one.
        reduction: one of `weft.layout.REDUCTIONS`.
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


COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}

# What torch has no sums and extrema for, and the dtype of as many bits that has them.
SIGNED: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def check_same(texts: Sequence[str], ranks: Sequence[int], what: str) -> None:
    """Check that all ranks hold the same text.

    Raises:
        RankFailure: names the ranks whose text differs from the one that most ranks have.
    """
    usual = max(texts, key=lambda text: (list(texts).count(text), -list(texts).index(text)))
    different = [rank for rank, text in zip(ranks, texts, strict=True) if text != usual]
    if different:
        raise RankFailure(
            f"{what} must be the same on all ranks, but differs on ranks {different} from that of the others; "
            "check that every rank runs the same script with the same model, strategy and versions"
        )
