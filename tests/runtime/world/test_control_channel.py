"""Connections between those who know a secret, and what somebody else can do on the way: nothing but end them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

import pytest

from weft.runtime.world import store as frames
from weft.runtime.world.store import AuthenticationFailedError, ControlChannel, authenticate

SECRET = b"the secret of the run"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def pair(ends: tuple[socket.socket, socket.socket]) -> tuple[ControlChannel, ControlChannel]:
    """The two ends of a connection, proven: who connected, and who listened."""
    client, server = ends
    found: list[ControlChannel] = []
    thread = threading.Thread(
        target=lambda: found.append(authenticate(server, SECRET, listens=True))
    )
    thread.start()
    line = authenticate(client, SECRET)
    thread.join(5)
    return line, found[0]


def test_messages_arrive_both_ways(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair(ends)
    for message in (b"", b"a", bytes(100_000)):
        sending = threading.Thread(target=one.send, args=(message,))
        sending.start()
        assert other.receive() == message
        sending.join(5)
        other.send(message[:10])
        assert one.receive() == message[:10]


def test_nothing_that_is_sent_holds_the_secret(ends: tuple[socket.socket, socket.socket]) -> None:
    proofs = frames.message_mac(SECRET, b"a"), frames.message_mac(SECRET, b"b")
    assert proofs[0] != proofs[1]
    assert frames.message_mac(SECRET, b"ab", b"c") != frames.message_mac(SECRET, b"a", b"bc")
    client, server = ends
    server.sendall(frames._HELLO + bytes(32) + bytes(32))
    with pytest.raises(AuthenticationFailedError, match="another secret"):
        authenticate(client, SECRET)
    assert SECRET not in server.recv(1000)


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        lambda frame: frame[:4] + bytes(32) + frame[36:],
        lambda frame: b"\xff\xff\xff\xff" + frame[4:],
        lambda frame: b"\0\0\0\1" + frame[4:],
    ],
)
def test_a_changed_message_is_refused(
    ends: tuple[socket.socket, socket.socket], change: Callable[[bytes], bytes]
) -> None:
    one, other = pair(ends)
    one.send(b"text")
    frame = ends[1].recv(1000)
    ends[0].sendall(change(frame))
    with pytest.raises(AuthenticationFailedError):
        other.receive()


def test_a_message_counts_once_and_in_its_direction(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair(ends)
    one.send(b"text")
    frame = ends[1].recv(1000)
    ends[0].sendall(frame + frame)
    assert other.receive() == b"text"
    with pytest.raises(AuthenticationFailedError):
        other.receive()
    ends[1].sendall(frame)  # back to who sent it
    with pytest.raises(AuthenticationFailedError):
        one.receive()


def test_who_knows_another_secret_learns_so_and_is_not_let_in(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    client, server = ends
    errors: list[OSError] = []

    def listen() -> None:
        try:
            authenticate(server, b"another secret", listens=True)
        except OSError as error:
            errors.append(error)
            server.close()

    thread = threading.Thread(target=listen)
    thread.start()
    with pytest.raises(AuthenticationFailedError, match="another secret"):
        authenticate(client, SECRET)
    thread.join(5)
    assert isinstance(errors[0], AuthenticationFailedError)


def test_who_says_nothing_is_not_waited_for(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "GREETING_SECONDS", 0.05)
    for listens in (False, True):
        with pytest.raises(OSError, match="timed out"):
            authenticate(ends[0], SECRET, listens)


@final
class Slow:
    """A connection that hears one byte a second, on a clock of its own."""

    def __init__(self) -> None:
        self.now, self.left = 0.0, 0.0

    def settimeout(self, seconds: float | None) -> None:
        assert seconds is not None
        self.left = seconds

    def sendall(self, message: bytes) -> None: ...

    def recv(self, count: int) -> bytes:
        if self.left < 1:
            raise TimeoutError("timed out")
        self.now += 1
        return frames._HELLO[int(self.now) - 1 :][:1] or b"x"


@pytest.mark.parametrize("listens", [False, True])
def test_who_says_a_byte_now_and_then_is_not_waited_for(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: Any = Slow()
    monkeypatch.setattr("weft.runtime.world.store.time.monotonic", lambda: slow.now)
    with pytest.raises(TimeoutError):
        authenticate(slow, SECRET, listens)
    assert slow.now == frames.GREETING_SECONDS


def test_who_is_no_store_is_told_apart(ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    server.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(AuthenticationFailedError, match="not a store of weft's"):
        authenticate(client, SECRET)


def test_an_end_that_goes_is_seen(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair(ends)
    one.close()
    with pytest.raises(ConnectionError, match="has gone"):
        other.receive()
