"""The store of several nodes: what torch and weft ask of one, and who may ask."""

from __future__ import annotations

import errno
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from queue import SimpleQueue

import pytest

from weft.errors import UserError
from weft.runtime.world import launchers
from weft.runtime.world import store as frames
from weft.runtime.world.launch import NodeProcesses, RemoteFailure
from weft.runtime.world.launchers import JoinedNode
from weft.runtime.world.store import NodesStore, Server, authenticate, split_address

SECRET = b"the secret of the run"


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), SECRET)
    yield found
    found.close()


@pytest.fixture
def client(server: Server) -> Iterator[NodesStore]:
    found = NodesStore(f"127.0.0.1:{server.port}", SECRET, 5)
    yield found
    found.close()


@pytest.fixture
def other(client: NodesStore) -> Iterator[NodesStore]:
    found = client.clone()
    yield found
    found.close()


def test_values(client: NodesStore, other: NodesStore) -> None:
    client.set("bytes", bytes(range(256)))
    assert other.get("bytes", 0) == bytes(range(256))
    assert (other.check(["bytes"]), other.check(["bytes", "none"])) == (True, False)
    assert [client.add("n", 2), other.add("n", 3)] == [2, 5]
    assert client.compare_set("c", b"", b"first") == b"first"
    assert other.compare_set("c", b"", b"second") == b"first"
    assert other.compare_set("c", b"first", b"second") == b"second"
    assert other.compare_set("none", b"x", b"y") == b"x"
    assert not other.check(["none"])
    assert client.num_keys() == 3
    assert [client.delete_key("c"), client.delete_key("c")] == [True, False]


def test_waits_end_when_the_value_comes_or_the_time_is_over(
    client: NodesStore, other: NodesStore
) -> None:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(other.get("late", 30)))
    thread.start()
    client.set("late", b"here")
    thread.join(30)
    assert found == [b"here"]
    with pytest.raises(TimeoutError, match="never"):
        client.get("never", 0)
    with pytest.raises(TimeoutError, match="never"):
        client.wait(["late", "never"], timedelta())


def test_a_will_comes_true_unless_it_is_taken_back(client: NodesStore) -> None:
    for key, kept in (("first", True), ("second", False)):
        dying = client.clone()
        dying.will(key, "gone")
        if not kept:
            dying.will(key, None)
        dying.set(f"{key} said", b"")
        dying.close()
    assert client.get("first", 10) == b"gone"
    assert not client.check(["second"])


def test_torch_takes_it_for_a_store(client: NodesStore) -> None:
    store = client
    store.set("key", "text")
    assert store.get("key") == b"text"
    clone = store.clone()
    assert clone.get("key") == b"text"
    clone.close()
    assert (store.add("n", 1), store.num_keys()) == (1, 2)
    assert store.compare_set("key", "text", "other") == b"other"
    store.wait(["key"], timedelta(seconds=1))
    assert store.check(["key"])
    assert store.delete_key("key")
    store.set_timeout(timedelta(0))
    assert store.timeout == timedelta(0)
    with pytest.raises(RuntimeError, match="not there after 0 s"):
        store.get("key")


def test_a_store_that_is_gone_is_told(server: Server, client: NodesStore) -> None:
    server.close()
    with pytest.raises(RuntimeError, match="the store of the job"):
        client.set("key", "text")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodesStore]:
    """A client of a store whose host has lost power when both had met."""
    monkeypatch.setattr(frames, "SILENCE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as held:

        def listen() -> None:
            connection = held.enter_context(listening.accept()[0])
            authenticate(connection, SECRET, listens=True)

        thread = threading.Thread(target=listen)
        thread.start()
        yield NodesStore(f"127.0.0.1:{listening.getsockname()[1]}", SECRET, 5)
        thread.join(5)


def test_a_store_that_is_silent_has_gone(silent: NodesStore) -> None:
    with pytest.raises(ConnectionError, match="has not answered for"):
        silent.get("key", 100)
    with pytest.raises(OSError, match="closed|descriptor|pipe"):  # it is not asked again
        silent.set("key", b"")


def test_a_launcher_sees_that_the_store_is_silent(silent: NodesStore) -> None:
    events: SimpleQueue[RemoteFailure] = SimpleQueue()
    launchers._watch(silent, events)
    assert "which keeps the store of the job, has gone" in events.get(timeout=5).text
    with pytest.raises(OSError, match="closed|descriptor|pipe"):
        JoinedNode(NodeProcesses(1), {}, events, silent).finish()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux's options")
def test_the_store_sees_that_a_node_has_lost_power(server: Server, client: NodesStore) -> None:
    client.set("key", b"")
    (line,) = server._lines
    options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    idle, pause, probes, unanswered = (
        line._connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options
    )
    assert line._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert 0 < idle + pause * probes <= frames.SILENCE_SECONDS
    assert unanswered == 1000 * frames.SILENCE_SECONDS


def test_a_store_goes_on_when_one_cannot_be_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, then too many threads; the next one is let in."""
    accept, start = socket.socket.accept, threading.Thread.start
    troubles = [OSError(errno.EMFILE, "too many open files"), RuntimeError("no new thread")]

    def accepted(listening: socket.socket) -> tuple[socket.socket, object]:
        if len(troubles) == 2:
            raise troubles.pop(0)
        return accept(listening)

    def started(thread: threading.Thread) -> None:
        if thread.name == "weft store connection" and troubles:
            raise troubles.pop()
        start(thread)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr(frames, "_AGAIN_SECONDS", 0.01)
    server = Server(("127.0.0.1", 0), SECRET)
    with pytest.raises(ConnectionError):
        NodesStore(f"127.0.0.1:{server.port}", SECRET, 5)
    client = NodesStore(f"127.0.0.1:{server.port}", SECRET, 5)
    client.set("key", b"")
    assert not troubles
    assert not server._unproven
    client.close()
    server.close()


def test_strangers_who_wait_do_not_crowd_the_job_out(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "GREETING_SECONDS", 100.0)
    address = "127.0.0.1", server.port
    strangers = [socket.create_connection(address, 20) for _ in range(frames.MOST_UNPROVEN + 1)]
    first = strangers[0]
    heard = b"?"
    while heard:  # its greeting, then the end
        heard = first.recv(100)
    client = NodesStore(f"127.0.0.1:{server.port}", SECRET, 20)
    client.set("key", b"")
    assert len(server._unproven) <= frames.MOST_UNPROVEN
    client.close()
    for stranger in strangers:
        stranger.close()


def test_who_has_another_secret_is_refused(server: Server) -> None:
    with pytest.raises(UserError, match="WEFT_SECRET to the same value"):
        NodesStore(f"127.0.0.1:{server.port}", b"another secret", 5)


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(TimeoutError, match="nobody listens"):
            NodesStore(f"127.0.0.1:{free.getsockname()[1]}", SECRET, 0)


def test_what_strangers_send_changes_nothing(server: Server, client: NodesStore) -> None:
    """Random bytes, requests without proof, what torch's own client says, connections that are left open."""
    draw = random.Random(0)
    held = []
    request = json.dumps(["set", "key", "planted"]).encode()
    for number in range(60):
        stranger = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        junk = [b"", draw.randbytes(draw.randrange(200)), request, b"\0\0\0\x24" + request]
        stranger.sendall(junk[number % 4])
        held.append(stranger)
    client.set("mine", b"true")
    assert client.get("mine", 5) == b"true"
    assert client.num_keys() == 1
    for stranger in held:
        stranger.close()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"{",
        b"[]",
        b'["close"]',
        b'["set"]',
        b'["set", "a", "\xc4\x80"]',
        b'["get", 3, 4]',
        b"7",
    ],
)
def test_nonsense_of_the_job_ends_its_connection_only(
    server: Server, client: NodesStore, message: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        line = authenticate(connection, SECRET)
        line.send(message)
        with pytest.raises(OSError, match="gone|reset"):
            line.receive()
    assert client.num_keys() == 0


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "a:²"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="host:port"):
        split_address(text)


def test_addresses() -> None:
    assert split_address("first-node:29400") == ("first-node", 29400)
    assert split_address("[::1]:29400") == ("::1", 29400)
