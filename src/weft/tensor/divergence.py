"""Divergence: ranks that run different ops are told by an error, not by a hang or by wrong numbers."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
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
from weft.runtime.failures.call_log import CallLog, PostedCalls, wait_cycle
from weft.runtime.world.world import World
from weft.tensor.spec import Mesh, channel_between

_checking: ContextVar[bool] = ContextVar("weft_check_every_op", default=False)

# A checksum of the plain tensors that met global ones between the ranks of each channel, and the last of them.
_plain: WeakKeyDictionary[Channel, tuple[int, str]] = WeakKeyDictionary()


@final
class _Ops:
    """The ops that this process has run on tensors of a channel's ranks: a checksum of all, and the last of them."""

    __slots__ = ("checksum", "last")

    def __init__(self) -> None:
        self.checksum = 0
        self.last = "none"


# For each channel, and of the channels of each mesh.
_ops: WeakKeyDictionary[Channel, _Ops] = WeakKeyDictionary()
_ops_of: WeakKeyDictionary[Mesh, tuple[_Ops, ...]] = WeakKeyDictionary()

# A checksum of what was written into live tensors, by the ranks of the placement that they are on.
_written: dict[frozenset[int], int] = {}

# By tensor, of which version.
_checksums: Any = WeakTensorKeyDictionary()


def meet(world: World, group: tuple[int, ...], what: str) -> Channel:
    """This process's end of an open communicator, once all its ranks are about to run the same collective for one op.

    Every rank sends numbers that stand for its collectives so far, for `what` comes next, for the ops that it has
    run, and for the plain tensors that it took as the same on all ranks. Only when they differ are texts exchanged
    too.

    Raises:
        RankFailure: names what every rank runs, and its line.
        UserError: in a process that was forked from the one whose connections these are.
    """
    world.check_process()
    channel = channel_between(world, group)
    world.calls.begun[group] += 1
    count = world.calls.begun[group]
    ops = _ops.get(channel)
    made = 0 if ops is None else ops.checksum
    plain, _ = _plain.get(channel, (0, ""))
    mine = torch.tensor([count, zlib.crc32(what.encode()), made, plain], device=channel.device)
    found = [torch.empty_like(mine) for _ in channel.ranks]
    with _Looking(channel, world.calls, what):
        channel.exchange([[mine]] * channel.size, [[buffer] for buffer in found])
    found[channel.index] = mine
    if all(torch.equal(other, mine) for other in found):
        return channel
    if ops is not None:
        ops.checksum = 0  # whoever continues after the error begins again
    if not all(torch.equal(other[:2], mine[:2]) for other in found):
        raise RankFailure(
            "the ranks run different ops; every rank must make the same calls on global tensors in the same order. "
            + _of_each(channel, f"{what} ({user_line()})")
        )
    if not all(other[2] == mine[2] for other in found):
        raise RankFailure(
            "the ranks have run different ops since they last compared them; every rank must make the same calls on "
            "global tensors in the same order, with the same numbers. Within weft.check_every_op() the first that "
            "differs is told. The last were "
            + _of_each(channel, "none" if ops is None else ops.last)
        )
    raise RankFailure(
        "plain tensors that met global ones differ between the ranks, but a plain tensor counts as the same on all "
        "of them, as a part that is given to weft.from_local does along an axis where it is Broadcast. Make it "
        "global: weft.from_local(x, …) when each process has its own part, weft.tensor(x, …) when the first rank's "
        "counts. The last were " + _of_each(channel, _plain.pop(channel, (0, ""))[1])
    )


def _of_each(channel: Channel, own: str) -> str:
    pairs = zip(channel.ranks, channel.exchange_text(own), strict=True)
    return "; ".join(f"rank {rank}: {text}" for rank, text in pairs)


def note_op(mesh: Mesh, op: str, token: int, floats: Sequence[float]) -> None:
    """Remember an op on tensors of `mesh`, for the next time that its ranks `meet`."""
    found = _ops_of.get(mesh)
    if found is None:
        found = _ops_of[mesh] = tuple(_ops.setdefault(each, _Ops()) for each in _channels_of(mesh))
    number = zlib.crc32(repr(floats).encode(), token) if floats else token
    for ops in found:
        ops.checksum = zlib.crc32(number.to_bytes(4, "big"), ops.checksum)
        ops.last = op


def note_made(mesh: Mesh, what: str, *facts: object) -> None:
    """Remember that global tensors of `mesh` are made, as of an op.

    Args:
        facts: all that decides their values, as far as all ranks must give the same.
    """
    if not mesh.in_process and mesh.ranks:
        note_op(mesh, what, zlib.crc32(f"{what} {facts}".encode()), ())


def _channels_of(mesh: Mesh, axes: Collection[int] | None = None) -> list[Channel]:
    """This process's channels along axes of a mesh, by default all, that have several ranks."""
    shape = mesh.placement.shape
    along = [x for x in (range(len(shape)) if axes is None else axes) if shape[x] > 1]
    groups = [mesh.placement.group(mesh.ranks[0], axis) for axis in along]
    return [channel_between(mesh.world, group) for group in groups]


def note_plain(
    mesh: Mesh, tensor: torch.Tensor, what: str = "", axes: Collection[int] | None = None
) -> None:
    """Remember a plain tensor that meets global ones of `mesh`, for the next time that its ranks `meet`.

    Scalars are not read from other devices than the CPU, which would wait for each.

    Args:
        axes: of the mesh; by default all.
    """
    if mesh.in_process or not mesh.ranks or (not tensor.dim() and tensor.device.type != "cpu"):
        return
    channels = _channels_of(mesh, axes)
    if not channels:
        return
    text = f"{what}{tensor.dtype} {list(tensor.shape)} ({user_line()})"
    checksum = _checksum(tensor).to_bytes(4, "big")
    for channel in channels:
        _plain[channel] = zlib.crc32(checksum, _plain.get(channel, (0, ""))[0]), text


def note_write(placement: Placement, what: str, plain: Iterable[torch.Tensor] = ()) -> None:
    """Remember a write into global tensors, in any order, for the stamps of the next step."""
    ranks = frozenset(placement.ranks)
    found = zlib.crc32(what.encode())
    for tensor in plain:
        if tensor.dim() or tensor.device.type == "cpu":
            found = zlib.crc32(_checksum(tensor).to_bytes(4, "big"), found)
    _written[ranks] = (_written.get(ranks, 0) + found) % 2**32


def forget() -> None:
    """After a failure, which ends what was compared: whoever continues does the same on all ranks from then on."""
    _written.clear()
    _plain.clear()
    for ops in _ops.values():
        ops.checksum = 0


def written_among(ranks: Iterable[int]) -> int:
    """The checksum of all writes that some ranks must have made alike."""
    found = 0
    for others, checksum in _written.items():
        if others.issuperset(ranks):
            found ^= checksum
    return found


def _checksum(tensor: torch.Tensor) -> int:
    version = None if tensor.is_inference() else tensor._version
    known = _checksums.get(tensor)
    if known is not None and known[0] == version and version is not None:
        return int(known[1])
    found, parts = 0, [tensor.detach()]
    if tensor.layout != torch.strided:
        entries = parts[0].to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
        parts = [entries.indices(), entries.values()]
    for part in parts:
        plain = part.resolve_conj().resolve_neg().cpu().contiguous()
        # One element may have any stride.
        values: Any = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
        found = zlib.crc32(values, found)
    _checksums[tensor] = (version, found)
    return found


@final
class _Looking:
    """Within the context, a long wait is made known to the other ranks, and compared with theirs."""

    def __init__(self, channel: Channel, calls: CallLog, what: str) -> None:
        self._channel = channel
        self._calls = calls
        self._what = what
        self._found = False

    def __enter__(self) -> None:
        if isinstance(self._channel, ProcessChannel):
            self._at_calls = self._channel.while_waiting
            self._channel.while_waiting = self._look

    def __exit__(self, *_: object) -> None:
        if not isinstance(self._channel, ProcessChannel):
            return
        self._channel.while_waiting = self._at_calls
        waited, self._calls.waits = self._calls.waits, None
        # The findings of a wait stay, so that the others find them too.
        if waited is not None and not self._found:
            self._channel.board.post(str(self._calls.posted()))

    def _look(self) -> None:
        """Post the wait, and compare it with those that others have posted."""
        channel: Any = self._channel
        if self._calls.waits is None:
            self._calls.wait_for(channel.ranks, self._what)
            channel.board.post(str(self._calls.posted()))

        def posted(rank: int) -> PostedCalls | None:
            text = channel.board.posted(rank)
            return PostedCalls.parse(text) if text else None

        found = wait_cycle(channel.rank, self._calls.posted(), posted)
        try:
            if found:
                nexts = [*list(found)[1:], next(iter(found))]
                error = RankFailure(
                    "the ranks wait for one another; every rank must make the same calls on global tensors in the same "
                    "order. "
                    + "; ".join(
                        f"rank {rank} waits for rank {peer} among {list(wait.ranks)}: {wait.call}"
                        for (rank, wait), peer in zip(found.items(), nexts, strict=True)
                    )
                )
                channel.abort(error)
                raise error
            self._at_calls()
        except RankFailure:
            self._found = True
            raise


@contextmanager
def check_every_op() -> Iterator[None]:
    """Within the context, ranks compare every op on global tensors, not only those that communicate.

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
    for channel in _channels_of(mesh):
        meet(mesh.world, channel.ranks, what)


def user_line() -> str:
    """File and line of the innermost frame of the user's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        if not in_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "line unknown"
