"""Divergence: ranks that run different ops are told by an error, not by a hang or by wrong numbers."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from weft.errors import RankFailure
from weft.files import in_library
from weft.layout import Placement
from weft.runtime.channels.channel import Channel
from weft.runtime.channels.process import ProcessChannel
from weft.runtime.failures.waits import Wait, circle
from weft.tensor.mesh import Mesh, channel_between

_checking: ContextVar[bool] = ContextVar("weft_check_every_op", default=False)

# How many collectives each channel has run.
_counts: WeakKeyDictionary[Channel, int] = WeakKeyDictionary()
# A checksum of the plain tensors that met global ones between the ranks of each channel, and the last of them.
_plain: WeakKeyDictionary[Channel, tuple[int, str]] = WeakKeyDictionary()


@final
class _Ops:
    """The ops that this process has run on tensors of a channel's ranks: a checksum of all, and the last of them."""

    __slots__ = ("checksum", "last")

    def __init__(self) -> None:
        self.checksum = 0
        self.last = "none"


# Of each channel, and of the channels of each mesh.
_ops: WeakKeyDictionary[Channel, _Ops] = WeakKeyDictionary()
_ops_of: WeakKeyDictionary[Mesh, tuple[_Ops, ...]] = WeakKeyDictionary()

# A checksum of what was written into live tensors, by the ranks of the placement that they lie on.
_written: dict[frozenset[int], int] = {}

# By tensor, of which version.
_checksums: Any = WeakTensorKeyDictionary()


def check_agreement(channel: Channel, what: str) -> None:
    """Check that all ranks of a channel are about to run the same collective for the same op.

    Every rank sends numbers that stand for its collectives so far, for `what` comes next, for the ops that it has
    run, and for the plain tensors that it took as the same on all ranks. Only when they differ are texts exchanged
    too.

    Raises:
        RankFailure: names what every rank runs, and its line.
    """
    count = _counts.get(channel, 0) + 1
    _counts[channel] = count
    checksum, last = _plain.get(channel, (0, ""))
    ops = _ops.get(channel)
    made = 0 if ops is None else ops.checksum
    mine = torch.tensor([count, zlib.crc32(what.encode()), made, checksum], device=channel.device)
    found = [torch.empty_like(mine) for _ in channel.ranks]
    with _told_of_circles(channel, what):
        channel.exchange([[mine]] * channel.size, [[buffer] for buffer in found])
    found[channel.index] = mine
    if all(torch.equal(other, mine) for other in found):
        return
    # Whoever goes on after the error begins anew.
    if ops is not None:
        ops.checksum = 0
    called = all(torch.equal(other[:2], mine[:2]) for other in found)
    same = called and all(other[2] == mine[2] for other in found)
    last = last if same else f"{what} ({user_line()})"
    if called and not same:
        last = "none" if ops is None else ops.last
    texts = channel.exchange_text(last)
    pairs = zip(channel.ranks, texts, strict=True)
    if called and not same:
        raise RankFailure(
            "the ranks have run different ops since they last compared them; every rank must make the same calls on "
            "global tensors in the same order, with the same numbers. Within weft.check_every_op() the first that "
            "differs is told. The last were " + "; ".join(f"rank {r}: {text}" for r, text in pairs)
        )
    if same:
        _plain.pop(channel, None)
        raise RankFailure(
            "plain tensors that met global ones differ between the ranks, but a plain tensor counts as the same on all "
            "of them. Make it global: weft.from_local(x, …) when each process has its own part, weft.tensor(x, …) when "
            "the first rank's counts. The last were "
            + "; ".join(f"rank {r}: {text}" for r, text in pairs)
        )
    raise RankFailure(
        "the ranks run different ops; every rank must make the same calls on global tensors in the same order. "
        + "; ".join(f"rank {rank}: {text}" for rank, text in pairs)
    )


def note_op(mesh: Mesh, op: str, token: int, floats: Sequence[float]) -> None:
    """Remember an op on tensors of `mesh`, for the next `check_agreement` of its ranks.

    Args:
        mesh: where it runs, on several processes.
        op: its name.
        token: stands for all but the floats among its arguments.
        floats: these.
    """
    found = _ops_of.get(mesh)
    if found is None:
        found = _ops_of[mesh] = tuple(_ops_on(mesh))
    number = zlib.crc32(repr(floats).encode(), token) if floats else token
    for ops in found:
        ops.checksum = zlib.crc32(number.to_bytes(4, "big"), ops.checksum)
        ops.last = op


def _ops_on(mesh: Mesh) -> Iterator[_Ops]:
    for axis, parts in enumerate(mesh.placement.shape):
        if parts > 1:
            group = mesh.placement.group(mesh.ranks[0], axis)
            yield _ops.setdefault(channel_between(mesh.world, group), _Ops())


def note_plain(mesh: Mesh, tensor: torch.Tensor) -> None:
    """Remember a plain tensor that meets global ones of `mesh`, for the next `check_agreement` of its ranks.

    Scalars are not read from other devices than the CPU, which would wait for each.
    """
    if mesh.in_process or not mesh.ranks or (not tensor.dim() and tensor.device.type != "cpu"):
        return
    checksum, text = _checksum(tensor), f"{tensor.dtype} {list(tensor.shape)} ({user_line()})"
    for axis, parts in enumerate(mesh.placement.shape):
        if parts > 1:
            channel = channel_between(mesh.world, mesh.placement.group(mesh.ranks[0], axis))
            before = _plain.get(channel, (0, ""))[0]
            _plain[channel] = zlib.crc32(checksum.to_bytes(4, "big"), before), text


def note_write(placement: Placement, what: str, plain: Iterable[torch.Tensor] = ()) -> None:
    """Remember a write into global tensors, for the stamps of the next step; in which order they come does not matter.

    Args:
        placement: where they lie, on several processes.
        what: was done.
        plain: tensors that it read, the same on all ranks.
    """
    ranks = frozenset(placement.ranks)
    found = zlib.crc32(what.encode())
    for tensor in plain:
        if tensor.dim() or tensor.device.type == "cpu":
            found = zlib.crc32(_checksum(tensor).to_bytes(4, "big"), found)
    _written[ranks] = (_written.get(ranks, 0) + found) % 2**32


def forget_writes() -> None:
    """After a failure, which ends what was compared: whoever goes on writes the same on all ranks first."""
    _written.clear()


def written_among(ranks: Iterable[int]) -> int:
    """The checksum of all writes that some ranks must have made alike."""
    found = 0
    for others, checksum in _written.items():
        if others.issuperset(ranks):
            found ^= checksum
    return found


def _checksum(tensor: torch.Tensor) -> int:
    """Of the values, computed once for each version of a tensor."""
    version = None if tensor.is_inference() else tensor._version
    known = _checksums.get(tensor)
    if known is not None and known[0] == version and version is not None:
        return int(known[1])
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    values: Any = plain.reshape(-1).view(torch.uint8).numpy()
    found = zlib.crc32(values)
    _checksums[tensor] = (version, found)
    return found


@contextmanager
def _told_of_circles(channel: Channel, what: str) -> Iterator[None]:
    """While this lasts, a long wait is made known to the other ranks, and compared with theirs.

    Raises:
        RankFailure: ranks wait for one another in different groups; names them all.
    """
    if not isinstance(channel, ProcessChannel):
        yield
        return
    looking = _Looking(channel, what)
    alone, channel.while_waiting = channel.while_waiting, looking.look
    try:
        yield
    finally:
        channel.while_waiting = alone
        looking.end()


@final
class _Looking:
    """One wait."""

    def __init__(self, channel: ProcessChannel, what: str) -> None:
        self._channel = channel
        self._what = what
        # What was posted of it, once it was long.
        self._wait: Wait | None = None
        self._found = False

    def look(self) -> None:
        """Post the wait, and compare it with what others have posted."""
        channel = self._channel
        if self._wait is None:
            begun = tuple((other.ranks, count) for other, count in _counts.items())
            text = f"{self._what} ({user_line()})"
            self._wait = Wait(channel.ranks, _counts[channel], begun, text)
            channel.board.post(str(self._wait))
        found = circle(channel.rank, self._wait, self._posted)
        if found:
            self._found = True
            error = RankFailure(_circle_text(found))
            channel.abort(error)
            raise error

    def end(self) -> None:
        """Take back what was posted; in a circle it stays, so that the others find it too."""
        if self._wait is not None and not self._found:
            self._channel.board.post("")

    def _posted(self, rank: int) -> Wait | None:
        text = self._channel.board.posted(rank)
        return Wait.parse(text) if text else None


def _circle_text(waits: Mapping[int, Wait]) -> str:
    nexts = [*list(waits)[1:], next(iter(waits))]
    each = (
        f"rank {rank} waits for rank {peer} among {list(wait.ranks)}: {wait.what}"
        for (rank, wait), peer in zip(waits.items(), nexts, strict=True)
    )
    return (
        "the ranks wait for one another; every rank must make the same calls on global tensors in the same order. "
        + "; ".join(each)
    )


@contextmanager
def check_every_op() -> Iterator[None]:
    """While this lasts, ranks compare every op on global tensors, not only those that communicate.

    For finding where processes part; each op then costs an exchange of messages.
    """
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def checking() -> bool:
    """True while every op is compared."""
    return _checking.get()


def check_every(mesh: Mesh, what: str) -> None:
    """Check that all ranks of a mesh are about to run the same op.

    Raises:
        RankFailure: names what every rank runs, and its line.
    """
    if mesh.in_process or not mesh.ranks:
        return
    for axis, parts in enumerate(mesh.placement.shape):
        if parts > 1:
            group = mesh.placement.group(mesh.ranks[0], axis)
            check_agreement(channel_between(mesh.world, group), what)


def user_line() -> str:
    """File and line of the innermost frame of the user's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        if not in_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "line unknown"
