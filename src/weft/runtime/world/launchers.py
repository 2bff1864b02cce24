"""The launchers of several nodes: they find each other, count their ranks, and tell each other of failures."""

from __future__ import annotations

import fcntl
import json
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, final

from weft.errors import UserError
from weft.runtime.world.launch import (
    SECRET,
    STORE,
    Exit,
    NodeProcesses,
    RemoteFailure,
    given_secret,
)
from weft.runtime.world.store import (
    NodesStore,
    Server,
    StoreError,
    message_mac,
    split_address,
)

# Seconds in which all nodes must come.
JOIN_SECONDS = 300.0
# Seconds in which the other nodes hear of a failure before the store ends.
_HEAR_SECONDS = 10.0
# The number of the start that is under way; none is there for the first.
_START = "weft/launcher/start"
# Says that no start follows.
_OVER = "weft/launcher/over"
# For one start: the nodes that take part.
_TAKING_PART = "nodes"
# For one start: the first failure.
FAILED = "failed"


def ended_key(rank: int, start: int) -> str:
    """The name of a rank's exit code in the store, once it has ended."""
    return f"weft/ended/{start}/{rank}"


def start_key(start: int, name: object) -> str:
    """The name of an entry of launchers that is of one start."""
    return f"weft/launcher/{start}/{name}"


@final
@dataclass(frozen=True)
class JoinedNode:
    """This node, once all have come."""

    fleet: NodeProcesses
    environment: Mapping[str, str]
    events: SimpleQueue[Any]
    store: NodesStore
    start: int = 0

    @property
    def failed(self) -> str:
        """The name of the entry that tells of the first failure."""
        return start_key(self.start, FAILED)

    def say_ended(self, end: Exit) -> None:
        """Tell the ranks of all nodes that one has ended."""
        with suppress(OSError):  # the store has gone, and with it all who would read
            self.store.set(ended_key(end.rank, self.start), str(end.code))

    def left(self) -> tuple[int, ...]:
        """Ranks of other nodes that have ended with exit code 0."""
        own = range(self.fleet.first, self.fleet.first + self.fleet.ranks)
        with suppress(OSError):
            return tuple(
                rank
                for rank in range(self.fleet.world)
                if rank not in own
                and self.store.check([ended_key(rank, self.start)])
                and self.store.get(ended_key(rank, self.start), 0) == b"0"
            )
        return ()

    def say_failed(self, text: str) -> RemoteFailure | None:
        """Tell the other nodes what has failed here; gives what one of them has told before."""
        own = f"{here(self.fleet)}: {text}".encode()
        with suppress(OSError):
            found = self.store.compare_set(self.failed, "", own)
            return None if found == own else RemoteFailure(found.decode())
        return None

    def failure(self, seconds: float) -> RemoteFailure | None:
        """The failure that another node tells within so many seconds."""
        with suppress(OSError):  # none, or the store has gone
            return RemoteFailure(self.store.get(self.failed, seconds).decode())
        return None

    def finish(self) -> RemoteFailure | None:
        """Say that this node is done, and wait until all are, or until one has failed; gives that failure."""
        keys = [start_key(self.start, f"done/{each}") for each in range(self.fleet.nodes)]
        self.store.will(self.failed, None)
        self.store.set(keys[self.fleet.node], "")
        while not self.store.check(keys):
            if self.store.check([self.failed]):
                return RemoteFailure(self.store.get(self.failed, 0).decode())
            with suppress(TimeoutError):
                self.store.wait(keys, timedelta())
        return None


def here(fleet: NodeProcesses) -> str:
    """The name of a node for messages."""
    return f"node {fleet.node} ({socket.gethostname()})"


@final
@dataclass(frozen=True)
class Nodes:
    """The meeting of the nodes of a job.

    Attributes:
        address: "host:port" of one of them, which keeps the store and listens there only.
        run_id: name of the run, the same on each.
    """

    count: int
    address: str
    run_id: str


@final
class Launchers:
    """The launchers of a job, one on each node, as one of them sees them, over all starts of the ranks."""

    def __init__(self, nodes: Nodes, store: NodesStore, secret: str) -> None:
        self.nodes = nodes
        self._store, self._secret = store, secret
        self._own = secrets.token_hex(8)
        store.will(_gone(self._own), "")

    @contextmanager
    def joined(
        self, ranks: int, least: int | None = None, seconds: float = JOIN_SECONDS
    ) -> Iterator[JoinedNode]:
        """Meet the other nodes for the start that is under way.

        A later start waits for all nodes, too: for one that has gone, until it is started again. With `least` it goes
        on without those that have gone.

        Args:
            ranks: processes of this node.
            least: ranks of all nodes with which the ranks are started again.
            seconds: in which all must come.

        Raises:
            UserError: the nodes do not come, or have gone on without this one.
        """
        store = self._store
        start = int(store.get(_START, 0)) if store.check([_START]) else 0
        fleet = self._fleet(start, ranks, least, seconds)
        environment = {STORE: self.nodes.address, SECRET: self._secret}
        if name := _interface(store.local):
            environment |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
        found = JoinedNode(fleet, environment, SimpleQueue(), store, start)
        store.will(found.failed, f"{here(fleet)} has gone")
        watched = store.clone()
        arguments = watched, found.events, start
        threading.Thread(target=_watch, args=arguments, daemon=True).start()
        try:
            yield found
        finally:
            watched.close()

    def again(self, start: int) -> bool:
        """Have another start follow one that has failed; False if none is to follow, or the store has gone."""
        before = str(start) if start else ""
        with suppress(OSError):
            if self._store.check([_OVER]):
                return False
            self._store.compare_set(_START, before, str(start + 1))
            return True
        return False

    def finish_job(self) -> None:
        """Have no other start follow, as somebody has ended the job."""
        with suppress(OSError):
            self._store.set(_OVER, "")

    def _fleet(self, start: int, ranks: int, least: int | None, seconds: float) -> NodeProcesses:
        store, closed = self._store, start_key(start, _TAKING_PART)
        number = store.add(start_key(start, "came"), 1) - 1
        entry = [self.nodes.count, self._own, ranks]
        store.set(start_key(start, f"node/{number}"), json.dumps(entry))
        end = time.monotonic() + seconds
        while not store.check([closed]):
            came = self._came(start)
            if self._own not in dict(came):
                raise self._too_many()
            if store.check([_OVER]):
                raise UserError("the job was ended on another node; start weft run again on each")
            if self._is_complete(start, came, least):
                store.compare_set(closed, "", json.dumps(self._ordered(start, came)))
            elif time.monotonic() > end:
                raise UserError(
                    f"{len(came)} of {self.nodes.count} nodes have come to {self.nodes.address} within {seconds:g} s; "
                    "start weft run with the same options on each"
                )
            else:
                with suppress(TimeoutError):
                    store.wait([closed], timedelta())
        return self._taken(start, ranks)

    def _too_many(self) -> UserError:
        return UserError(
            f"{self.nodes.count} nodes have come to {self.nodes.address} already; start weft run once on each of them"
        )

    def _taken(self, start: int, ranks: int) -> NodeProcesses:
        every = self._taking_part(start)
        names, counts = [name for name, _ in every], [count for _, count in every]
        if self._own not in names and not start:
            raise self._too_many()
        if self._own not in names:
            raise UserError(
                f"the job at {self.nodes.address} has gone on without this node, on {len(every)} nodes; start weft run "
                "here again when it has failed the next time"
            )
        number = names.index(self._own)
        return NodeProcesses(ranks, sum(counts[:number]), sum(counts), number, len(every))

    def _came(self, start: int) -> list[tuple[str, int]]:
        """Name and ranks of the nodes that have come and are still there, as many as there are to be."""
        keys = [
            start_key(start, f"node/{each}")
            for each in range(self._store.add(start_key(start, "came"), 0))
        ]
        every = [json.loads(self._store.get(key, 0)) for key in keys if self._store.check([key])]
        if any(count != self.nodes.count for count, *_ in every):
            raise UserError(
                f"--nodes must be the same on all nodes, got {[each[0] for each in every]}"
            )
        there = [(name, ranks) for _, name, ranks in every if not self._store.check([_gone(name)])]
        return there[: self.nodes.count]

    def _is_complete(self, start: int, came: Sequence[tuple[str, int]], least: int | None) -> bool:
        if len(came) == self.nodes.count:
            return True
        if not start or least is None or sum(ranks for _, ranks in came) < least:
            return False
        names = {name for name, _ in came}
        before = self._taking_part(start - 1)
        return all(name in names or self._store.check([_gone(name)]) for name, _ in before)

    def _taking_part(self, start: int) -> list[tuple[str, int]]:
        text = self._store.get(start_key(start, _TAKING_PART), 0)
        return [(name, ranks) for name, ranks in json.loads(text)]

    def _ordered(self, start: int, came: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """The nodes in the order of the start before, so that ranks stay on their hosts; new ones fill gaps."""
        if not start:
            return list(came)
        there, before = dict(came), [name for name, _ in self._taking_part(start - 1)]
        new = [name for name in there if name not in before]
        order = []
        for name in before:
            if name in there:
                order.append(name)
            elif new:
                order.append(new.pop(0))
        return [(name, there[name]) for name in (*order, *new)]


def _gone(name: str) -> str:
    return f"weft/launcher/gone/{name}"


@contextmanager
def launchers(nodes: Nodes, seconds: float = JOIN_SECONDS) -> Iterator[Launchers]:
    """Reach the store of the job; at the end, the one that keeps it lets the others read what has failed.

    Raises:
        UserError: without a secret; where the address is none, or the store has gone.
    """
    given = given_secret()
    if not given:
        raise UserError(
            f"several nodes need a secret: give {SECRET} the same value on all of them, such as "
            "`openssl rand -hex 32` prints once"
        )
    secret = message_mac(given, b"run", nodes.run_id.encode()).hex()
    place, server = split_address(nodes.address), None
    for family, _, _, _, (host, port, *_) in socket.getaddrinfo(*place, type=socket.SOCK_STREAM):
        with suppress(OSError):  # another node has the address, or another launcher of this one
            server = server or Server((str(host), int(port)), secret.encode(), family)
    try:
        store = NodesStore(nodes.address, secret.encode(), seconds)
        try:
            yield Launchers(nodes, store, secret)
        finally:
            store.close()
    except (TimeoutError, StoreError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"the store of the job at {nodes.address}: {error}") from error
    finally:
        if server is not None:
            server.drain(_HEAR_SECONDS)
            server.close()


def _interface(address: str) -> str:
    if sys.platform != "linux" or ":" in address:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(asked, 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def _watch(store: NodesStore, events: SimpleQueue[Any], start: int = 0) -> None:
    while True:
        try:
            text = store.get(start_key(start, FAILED), JOIN_SECONDS).decode()
        except TimeoutError:
            continue
        except OSError:
            text = f"the node at {store.address}, which keeps the store of the job, has gone"
        events.put(RemoteFailure(text))
        return
