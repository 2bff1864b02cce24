"""The launchers of several nodes: they find each other, count their ranks, and tell each other of failures."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, final

from weft.errors import UserError
from weft.runtime.world.launch import Elsewhere, Exit, Fleet
from weft.runtime.world.nodes.client import Client, split_address
from weft.runtime.world.nodes.frames import proof
from weft.runtime.world.nodes.server import Server
from weft.runtime.world.variables import SECRET, STORE, given_secret

# Seconds in which all nodes must come.
JOIN_SECONDS = 300.0
# Seconds in which the other nodes hear of a failure before the store ends.
_HEAR_SECONDS = 10.0
_FAILED = "weft/launcher/failed"


def ended_key(rank: int) -> str:
    """The name of a rank's exit code in the store, once it has ended."""
    return f"weft/ended/{rank}"


@final
@dataclass(frozen=True)
class Nodes:
    """The meeting of the nodes of a job.

    Attributes:
        count: how many there are.
        address: "host:port" of one of them, which keeps the store and listens there only.
        run_id: name of the run, the same on each.
    """

    count: int
    address: str
    run_id: str


@final
@dataclass(frozen=True)
class Joined:
    """This node, once all have come.

    Attributes:
        fleet: its ranks.
        environment: what these need to meet the others.
        events: gets the failures of other nodes.
        client: the connection to the store.
    """

    fleet: Fleet
    environment: Mapping[str, str]
    events: SimpleQueue[Any]
    client: Client

    def say_ended(self, end: Exit) -> None:
        """Tell the ranks of all nodes that one has ended."""
        with suppress(OSError):  # the store has gone, and with it all who would read
            self.client.set(ended_key(end.rank), str(end.code).encode())

    def left(self) -> tuple[int, ...]:
        """Ranks of other nodes that have ended with exit code 0."""
        own = range(self.fleet.first, self.fleet.first + self.fleet.ranks)
        with suppress(OSError):
            return tuple(
                rank
                for rank in range(self.fleet.world)
                if rank not in own
                and self.client.check([ended_key(rank)])
                and self.client.get(ended_key(rank), 0) == b"0"
            )
        return ()

    def say_failed(self, text: str) -> Elsewhere | None:
        """Tell the other nodes what has failed here; gives what one of them has told before."""
        own = f"{_here(self.fleet)}: {text}".encode()
        with suppress(OSError):
            found = self.client.compare_set(_FAILED, b"", own)
            return None if found == own else Elsewhere(found.decode())
        return None

    def failure(self, seconds: float) -> Elsewhere | None:
        """The failure that another node tells within so many seconds."""
        with suppress(OSError):  # none, or the store has gone
            return Elsewhere(self.client.get(_FAILED, seconds).decode())
        return None

    def finish(self) -> Elsewhere | None:
        """Say that this node is done, and wait until all are, or until one has failed; gives that failure."""
        keys = [f"weft/launcher/done/{each}" for each in range(self.fleet.nodes)]
        self.client.will(_FAILED, None)
        self.client.set(keys[self.fleet.node], b"")
        while not self.client.check(keys):
            if self.client.check([_FAILED]):
                return Elsewhere(self.client.get(_FAILED, 0).decode())
            with suppress(TimeoutError):
                self.client.wait(keys, 0)
        return None


@contextmanager
def joined(nodes: Nodes, ranks: int, seconds: float = JOIN_SECONDS) -> Iterator[Joined]:
    """Meet the other nodes; at the end, the one that keeps the store lets the others read what has failed.

    Args:
        nodes: of the job.
        ranks: processes of this node.
        seconds: in which all must come.

    Raises:
        UserError: without a secret; where the address is none, or the nodes do not come.
    """
    given = given_secret()
    if not given:
        raise UserError(
            f"several nodes need a secret: give {SECRET} the same value on all of them, such as "
            "`openssl rand -hex 32` prints once"
        )
    secret = proof(given, b"run", nodes.run_id.encode()).hex()
    split_address(nodes.address)
    server = _serve(nodes.address, secret.encode())
    try:
        client = Client(nodes.address, secret.encode(), seconds)
        fleet = _count(client, nodes, ranks, seconds)
        found = Joined(fleet, _environment(nodes, client, secret), SimpleQueue(), client)
        client.will(_FAILED, f"{_here(fleet)} has gone".encode())
        watched = client.another()
        threading.Thread(target=_watch, args=(watched, found.events), daemon=True).start()
        try:
            yield found
        finally:
            watched.close()
            client.close()
    except TimeoutError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"the store of the job at {nodes.address}: {error}") from error
    finally:
        if server is not None:
            server.drain(_HEAR_SECONDS)
            server.close()


def _serve(address: str, secret: bytes) -> Server | None:
    """The store, where the address is one of this node and nobody has taken it."""
    for family, _, _, _, place in socket.getaddrinfo(
        *split_address(address), type=socket.SOCK_STREAM
    ):
        with suppress(OSError):
            return Server((str(place[0]), int(place[1])), secret, family)
    return None


def _count(client: Client, nodes: Nodes, ranks: int, seconds: float) -> Fleet:
    number = client.add("weft/launcher/nodes", 1) - 1
    if number >= nodes.count:
        raise UserError(
            f"{nodes.count} nodes have come to {nodes.address} already; start weft run once on each of them"
        )
    client.set(f"weft/launcher/node/{number}", json.dumps([nodes.count, ranks]).encode())
    keys = [f"weft/launcher/node/{each}" for each in range(nodes.count)]
    try:
        client.wait(keys, seconds)
    except TimeoutError:
        here = sum(client.check([key]) for key in keys)
        raise UserError(
            f"{here} of {nodes.count} nodes have come to {nodes.address} within {seconds:g} s; start weft run with the "
            "same options on each"
        ) from None
    every = [json.loads(client.get(key, seconds)) for key in keys]
    if any(count != nodes.count for count, _ in every):
        raise UserError(
            f"--nodes must be the same on all nodes, found {[each[0] for each in every]}"
        )
    counts = [each[1] for each in every]
    return Fleet(ranks, sum(counts[:number]), sum(counts), number, nodes.count)


def _environment(nodes: Nodes, client: Client, secret: str) -> dict[str, str]:
    found = {STORE: nodes.address, SECRET: secret}
    name = _interface(client.local)
    return (
        {**found, "GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else found
    )


def _interface(address: str) -> str:
    """The name of the interface that has an IPv4 address of this node; "" where it is not found."""
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


def _watch(client: Client, events: SimpleQueue[Any]) -> None:
    """Wait for the failure of another node."""
    while True:
        try:
            text = client.get(_FAILED, JOIN_SECONDS).decode()
        except TimeoutError:
            continue
        except OSError:
            text = f"the node at {client.address}, which keeps the store of the job, has gone"
        events.put(Elsewhere(text))
        return


def _here(fleet: Fleet) -> str:
    return f"node {fleet.node} ({socket.gethostname()})"
