"""Communicators through shared memory: both ends in one process, as threads."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from on_ranks import passed
from strangers import needs_root, start_as_stranger
from weft.errors import InternalError, NoAnswer, RankFailure
from weft.layout import REDUCTIONS
from weft.runtime.channels import shared, shared_link
from weft.runtime.channels.channel import reduce_in_order
from weft.runtime.channels.shared import SharedChannel, received_uses
from weft.runtime.channels.shared_link import (
    SLOT_BYTES,
    SLOTS,
    Take,
    connect,
    host,
    listener,
    offer,
)
from weft.runtime.failures.failure_store import StoreEntries

pytestmark = pytest.mark.skipif(not host(), reason="this system has no memory without a name")

SIZES = [0, 1, 7, SLOT_BYTES // 8, SLOT_BYTES // 8 + 1, (2 * SLOTS + 1) * SLOT_BYTES // 8 + 3]


class Board:
    """Stands in for the board of a job: no failure is known."""

    failed = False

    def watch(self, fail: object) -> None: ...

    def forget(self, fail: object) -> None: ...

    def announce(self, error: BaseException) -> None:
        self.failed = True

    def cause(self, seconds: float) -> None:
        return None


def on_ranks(size: int, work: Callable[[SharedChannel], Any], timeout: float = 20) -> list[Any]:
    """What `work` gives on each rank of a communicator; the first error of a rank in its place."""
    store, board = dist.HashStore(), Board()  # type: ignore[attr-defined]

    def run(index: int) -> Any:
        entries = StoreEntries(store, index, lambda _: False, timeout)
        channel = SharedChannel(entries, 1, range(size), index, board, timeout)  # type: ignore[arg-type]
        try:
            return work(channel)
        except Exception as error:
            channel.abort(error)
            return error
        finally:
            channel.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def numbers(rank: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, (size,), generator=generator).to(dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_pieces_of_any_size_arrive(size: int) -> None:
    def work(channel: SharedChannel) -> list[list[torch.Tensor]]:
        me = channel.index
        sends = [[numbers(10 * me + peer, n + peer) for n in SIZES] for peer in range(size)]
        places = [[torch.empty(n + me, dtype=torch.float64) for n in SIZES] for _ in range(size)]
        channel.exchange(sends, places)
        return places

    for me, places in enumerate(on_ranks(size, work)):
        for peer in set(range(size)) - {me}:
            for n, found in zip(SIZES, places[peer], strict=True):
                assert torch.equal(found, numbers(10 * peer + me, n + me))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_all_reduce_is_the_reduction_in_order(size: int, reduction: str) -> None:
    dtype = torch.int64 if reduction in ("and", "or", "xor") else torch.float64

    def work(channel: SharedChannel) -> list[torch.Tensor]:
        alone = [numbers(channel.index, n, dtype) for n in SIZES]
        together = [numbers(channel.index, n, dtype) for n in SIZES]
        for tensor in alone:
            channel.all_reduce([tensor], reduction)
        channel.all_reduce(together, reduction)
        return alone + together

    expected = [
        reduce_in_order([numbers(rank, n, dtype) for rank in range(size)], reduction) for n in SIZES
    ]
    for found in on_ranks(size, work):
        assert len(found) == 2 * len(expected)
        assert all(map(torch.equal, found, expected * 2))


def fractions(rank: int, size: int) -> torch.Tensor:
    """Numbers whose sum depends on the order in its last bits."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator) * 10 ** (rank % 3)


def in_order(size: int, count: int) -> torch.Tensor:
    return reduce_in_order([fractions(rank, count) for rank in range(size)], "sum")


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_reductions_have_the_bits_of_the_order_whoever_comes_last(size: int, late: int) -> None:
    counts = [count for count in SIZES if count]
    here = threading.Barrier(size - 1)
    others_began = threading.Event()

    def wait(channel: SharedChannel) -> None:
        if channel.index == late % size:
            others_began.wait(10)
        elif here.wait(10) == 0:
            others_began.set()

    def work(channel: SharedChannel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        wait(channel)
        tensors = [fractions(channel.index, count) for count in counts]
        channel.all_reduce(tensors, "sum")
        parts = [list(fractions(channel.index, size * n).chunk(size)) for n in counts]
        pieces = [[part[peer].clone() for part in parts] for peer in range(size)]
        return tensors, channel.reduce_scatter(pieces, "sum")

    for index, (reduced, scattered) in enumerate(on_ranks(size, work)):
        assert all(map(torch.equal, reduced, [in_order(size, count) for count in counts]))
        expected = [in_order(size, size * count).chunk(size)[index] for count in counts]
        assert all(map(torch.equal, scattered, expected))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_comes_is_reduced_without_a_place_of_its_own(size: int) -> None:
    def work(channel: SharedChannel) -> tuple[list[torch.Tensor], int]:
        channel.all_reduce([torch.ones(SLOT_BYTES + 1)], "sum")
        sent = channel.sent["all_reduce"]
        channel.reduce_scatter([[torch.ones(SLOT_BYTES)] for _ in range(size)], "sum")
        return channel._arrived._buffers, sent

    elements = SLOT_BYTES + 1
    parts = [len(part) for part in torch.empty(elements).tensor_split(size)]
    for index, (buffers, sent) in enumerate(on_ranks(size, work)):
        assert buffers == []
        others = elements - parts[index]
        assert sent == 4 * (elements if size == 2 else others + (size - 1) * parts[index])


@pytest.mark.parametrize("size", [3, 4])
def test_a_chunk_is_reduced_over_all_ranks_before_the_next(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no more than a chunk of what has come waits for this rank's own numbers."""
    taken: dict[int, list[int]] = {index: [] for index in range(size)}

    def noting(size: int, index: int, reduction: str) -> list[Take]:
        def noted(number: int, take: Take) -> Take:
            def both(*tensors: torch.Tensor) -> None:
                taken[index].append(number)
                take(*tensors)

            return both

        return [noted(*each) for each in enumerate(received_uses(size, index, reduction))]

    monkeypatch.setattr(shared, "received_uses", noting)
    chunks = 3 * SLOTS
    pieces = [torch.ones(chunks * SLOT_BYTES // 4) for _ in range(size)]
    on_ranks(size, lambda channel: channel.reduce_scatter([[one] for one in pieces], "sum"))
    assert taken == dict.fromkeys(range(size), list(range(size - 1)) * chunks)


def test_what_a_peer_sent_before_it_left_waits_for_its_turn() -> None:
    address = f"\0weft-test-{uuid.uuid4().hex}"
    with listener(address) as listening, ThreadPoolExecutor(1) as pool:
        offered = pool.submit(offer, listening, 10)
        sender = connect(address, 1, 10)
        _, link = offered.result()
    sender.begin([torch.arange(3.0)], [])
    sender.advance()
    sender.close()
    place, turn = torch.zeros(3), [False]
    link.begin([], [place], turn=lambda: turn[0])
    link.listen()
    link.advance()
    link.listen()
    link.advance()
    assert link.closed
    assert link.busy
    turn[0] = True
    link.advance()
    assert place.tolist() == [0.0, 1.0, 2.0]
    assert not link.busy
    link.begin([], [place])
    with pytest.raises(ConnectionError):
        link.advance()
    link.close()


def test_bytes_are_counted_once() -> None:
    def work(channel: SharedChannel) -> int:
        channel.all_reduce([torch.ones(100)], "sum")
        return channel.sent["all_reduce"]

    assert on_ranks(2, work) == [400, 400]


def test_a_rank_may_run_ahead() -> None:
    """One rank only sends, the other only receives: nothing but the slots holds the first one back."""

    def work(channel: SharedChannel) -> Sequence[float]:
        found = []
        for number in range(3 * SLOTS):
            piece = torch.full((3,), float(number))
            if channel.index == 0:
                channel.exchange([[], [piece]], [[], []])
            else:
                channel.exchange([[], []], [[piece.zero_()], []])
                found.append(piece[0].item())
        return found

    assert on_ranks(2, work)[1] == list(range(3 * SLOTS))


def test_ranks_that_disagree_on_a_size_are_told() -> None:
    def work(channel: SharedChannel) -> None:
        channel.all_reduce([torch.ones(4 + channel.index)], "sum")

    found = on_ranks(2, work)
    assert any("bytes where" in str(error) for error in found)
    assert all(isinstance(error, InternalError | RankFailure) for error in found)


def test_a_rank_that_ends_is_noticed_at_once() -> None:
    def work(channel: SharedChannel) -> None:
        if channel.index == 0:
            channel.all_reduce([torch.ones(4)], "sum")

    first, _ = on_ranks(2, work)
    assert isinstance(first, RankFailure)
    assert "with ranks [1] failed" in str(first)


def test_a_rank_that_does_not_come_is_named() -> None:
    over = threading.Event()

    def work(channel: SharedChannel) -> None:
        if channel.index == 1:
            over.wait(20)
            return
        try:
            channel.all_reduce([torch.ones(4)], "sum")
        finally:
            over.set()

    first, _ = on_ranks(2, work, timeout=0.2)
    assert isinstance(first, RankFailure)
    assert "with ranks [1] failed" in str(first)
    assert "no answer within 0.2 s" in str(first)


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_has_ended_before_it_connects_is_named(index: int) -> None:
    """Both where the other one is to connect and where it was to be found."""
    entries = StoreEntries(dist.HashStore(), index, lambda rank: rank == 1 - index, 20)  # type: ignore[attr-defined]
    with pytest.raises(NoAnswer, match=f"rank {1 - index} has ended before it came to a link"):
        SharedChannel(entries, 1, range(2), index, Board(), 20)  # type: ignore[arg-type]


@pytest.mark.parametrize("died", [True, False])
def test_a_rank_that_ends_or_stops_while_it_connects_is_named(died: bool) -> None:
    """Rank 0 has said where it listens; then nobody is there, or nobody answers."""
    address, store = f"weft-{uuid.uuid4().hex}", dist.HashStore()  # type: ignore[attr-defined]
    store.set("weft/link/1/0", address)
    entries = StoreEntries(store, 1, lambda _: False, 20)
    named = r"waits for a link to one of \[0\], which has ended"
    with listener("\0" + address + "-" * died), pytest.raises(NoAnswer, match=named):
        SharedChannel(entries, 1, range(2), 1, Board(), 0.05)  # type: ignore[arg-type]


def test_a_rank_that_connects_and_ends_at_once_is_named() -> None:
    store, found = dist.HashStore(), list[BaseException]()  # type: ignore[attr-defined]

    def wait() -> None:
        try:
            entries = StoreEntries(store, 0, lambda _: False, 20)
            SharedChannel(entries, 1, range(2), 0, Board(), 20)  # type: ignore[arg-type]
        except NoAnswer as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    with socket.socket(socket.AF_UNIX) as other:
        other.connect("\0" + store.get("weft/link/1/0").decode())
    thread.join(10)
    assert "waits for a link to one of [1], which has ended" in str(found[0])


@needs_root
def test_a_stranger_is_no_peer() -> None:
    code = (
        "listening = socket.socket(socket.AF_UNIX)\n"
        "listening.bind('')\n"  # the system chooses a name
        "listening.listen()\n"
        "print(listening.getsockname()[1:].decode(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with start_as_stranger(code, imports="import socket, sys") as stranger:
        address = "\0" + stranger.stdout.readline().strip()
        with pytest.raises(ConnectionError, match="another user listens"):
            connect(address, 1, timeout=5)
        stranger.communicate(timeout=20)


@needs_root
def test_a_stranger_who_connects_gets_no_memory() -> None:
    """He comes before the peer, and is sent away; the peer then gets in."""
    code = (
        "tried = socket.socket(socket.AF_UNIX)\n"
        "tried.connect('\\0' + sys.argv[1])\n"
        "print(len(tried.recv(1)))\n"
    )
    name = "weft-test-of-strangers"
    with (
        listener("\0" + name) as listening,
        ThreadPoolExecutor(1) as pool,
        start_as_stranger(code, name, imports="import socket, sys") as stranger,
    ):
        offered = pool.submit(offer, listening, 20)
        assert stranger.communicate(timeout=20)[0] == "0\n"
        link = connect("\0" + name, 3, 20)
        number, other = offered.result(20)
        assert number == 3
        link.close()
        other.close()


@pytest.mark.parametrize("kind", ["file", "unsealed", "small", "none"])
def test_memory_that_may_change_its_size_is_refused(kind: str, tmp_path: Path) -> None:
    """Who maps it would be ended by the system when the other end makes it smaller."""
    path = tmp_path / "file"
    path.write_bytes(bytes(2**16))

    def hand_over(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        connection.recv(8, socket.MSG_WAITALL)
        descriptor = os.open(path, os.O_RDWR)
        if kind != "file":
            os.close(descriptor)
            descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, 4096 if kind == "small" else shared_link._BYTES)
        if kind == "small":
            fcntl.fcntl(descriptor, shared_link._ADD_SEALS, shared_link._SEALS)
        if kind == "none":
            connection.sendall(b".")
        else:
            socket.send_fds(connection, [b"."], [descriptor])
        os.close(descriptor)
        connection.close()

    name = f"\0weft-test-{kind}"
    with listener(name) as listening, ThreadPoolExecutor(1) as pool:
        handing = pool.submit(hand_over, listening)
        with pytest.raises(ConnectionError, match="a peer shares"):
            connect(name, 1, 20)
        handing.result(20)


def test_neither_end_can_change_the_size_of_memory() -> None:
    name = "\0weft-test-sealed"
    seen: list[int] = []

    def mapped(connection: socket.socket, descriptor: int, lower: bool) -> None:
        for size in (0, 2**30):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        seen.append(descriptor)
        os.close(descriptor)
        connection.close()

    with (
        listener(name) as listening,
        ThreadPoolExecutor(1) as pool,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(shared_link, "_mapped", mapped)
        offered = pool.submit(offer, listening, 20)
        connect(name, 1, 20)
        offered.result(20)
    assert len(seen) == 2


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_world_of_processes_picks_its_transport(transport: str, tmp_path: Path) -> None:
    script = tmp_path / "which.py"
    script.write_text(
        "from weft.runtime.world.distributed import DistributedWorld\n"
        "import torch\n"
        "world = DistributedWorld('cpu', 30)\n"
        "total = torch.ones(3)\n"
        "world._everyone.all_reduce([total], 'sum')\n"
        "import sys\n"
        "sys.stdout.write(f'{type(world._everyone).__name__} {total.tolist()}\\n')\n"
    )
    outputs = passed(script, 2, WEFT_TRANSPORT=transport)
    name = {"shared": "SharedChannel", "gloo": "GlooChannel"}[transport]
    assert all(f"{name} [2.0, 2.0, 2.0]" in output for output in outputs)
