"""Ranks with slow links between them: each in a network namespace of its own, on a bridge, at a limited rate.

Everything between the ranks goes through the limited links: shared memory is off. Links need root (network namespaces
and `tc`). Their rate is measured with a plain socket first. Nothing is left behind, not by a killed run either.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

PREFIX = "weftlink"
PORT = 29511
# What is sent to measure the rate.
SAMPLE = 16 << 20
# A bucket of packets that the limit lets through at once, and how long a packet may wait.
BURST, QUEUED = "256kb", "100ms"
INTERFACE = "link0"
CLONE_NEWNET = 0x40000000

# Waits until its input ends, as it does when the process that holds it is no more, and removes namespaces.
GUARD = """
cat > /dev/null
for name; do ip netns pids $name | xargs -r kill -9; ip netns delete $name; done
"""
SERVER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
client, _ = server.accept()
buffer, size = bytearray(1 << 20), client.recv_into(bytearray(1), 1)
start = time.perf_counter()
while count := client.recv_into(buffer):
    size += count
print(size * 8 / (time.perf_counter() - start), flush=True)
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as server:
    for _ in range(int(sys.argv[3]) >> 20):
        server.sendall(bytes(1 << 20))
"""


class LinksError(RuntimeError):
    """Links cannot be made here; says what is missing."""


@dataclass(frozen=True)
class Links:
    """Namespaces of the ranks, joined.

    Attributes:
        names: of the ranks' namespaces.
        addresses: of the ranks.
        switch: the namespace of the bridge that joins them.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    switch: str = ""

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """A command as it runs in a rank's namespace."""
        return ["ip", "netns", "exec", self.names[rank], *command]

    def environment(self) -> dict[str, str]:
        """How the ranks meet; shared memory is off, as between hosts."""
        return {
            "MASTER_ADDR": self.addresses[0],
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "WEFT_TRANSPORT": "gloo",
        }

    def enter(self, rank: int) -> dict[str, str]:
        """Move the calling thread, and so those that it will start, to a rank's namespace.

        Returns:
            what must be in the environment there.
        """
        namespace = os.open(f"/run/netns/{self.names[rank]}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.names[rank]}")
        finally:
            os.close(namespace)
        return self.environment()

    def cut(self, rank: int) -> None:
        """Cut a rank off from all others, as a cable that is pulled does: nothing comes, and no end is told."""
        _ip("-n", self.switch, "link", "set", f"port{rank}", "down")

    def join(self, rank: int) -> None:
        """Put the cable of a rank back."""
        _ip("-n", self.switch, "link", "set", f"port{rank}", "up")

    def rate(self, sample: int = SAMPLE) -> float:
        """Bits a second of one plain socket from the last rank to the first, over `sample` bytes."""
        where = [self.addresses[0], str(PORT)]
        python = [sys.executable, "-c"]
        server = subprocess.Popen(
            self.command(0, [*python, SERVER, *where]), stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            server.stdout.readline()
            last = len(self.names) - 1
            subprocess.run(
                self.command(last, [*python, CLIENT, *where, str(sample)]), check=True, timeout=60
            )
            return float(server.communicate(timeout=60)[0])
        finally:
            server.kill()
            server.wait()


@contextmanager
def slow_links(ranks: int, rate: str) -> Iterator[Links]:
    """Make links, and remove them whatever happens.

    Args:
        ranks: how many, at most 200.
        rate: of each rank's link, in both directions, as `tc` reads it, such as "1gbit".

    Raises:
        LinksError: without root, `ip` or `tc`, or when one of them fails.
    """
    _check()
    remove_stale()
    names = tuple(f"{PREFIX}{os.getpid()}-{rank}" for rank in range(ranks))
    switch = f"{PREFIX}{os.getpid()}-switch"
    links = Links(names, tuple(f"10.211.7.{rank + 1}" for rank in range(ranks)), switch)
    guard = _guard((*names, switch))
    try:
        _make_switch(switch)
        for rank in range(ranks):
            _join(links, rank, switch, rate)
        if ranks > 1:
            found = f"{links.rate() / 1e6:.0f} Mbit/s"
            print(f"links of {rate}: a socket gets {found}", file=sys.stderr, flush=True)
        yield links
    finally:
        for name in (*names, switch):
            remove(name)
        guard.kill()
        guard.communicate()


def _guard(names: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that outlives this one, even when it is killed, to remove its namespaces."""
    command = ["sh", "-c", GUARD, "guard", *names]
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
    )


def _check() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinksError(f"slow links need {' and '.join(missing)} (package iproute2), not found")
    if os.geteuid() != 0:
        raise LinksError(
            f"slow links need root for network namespaces, found user {os.geteuid()}; "
            "run as root, or leave --link out"
        )


def _make_switch(switch: str) -> None:
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")


def _join(links: Links, rank: int, switch: str, rate: str) -> None:
    """A rank's namespace, its cable to the switch, and the limit at both of its ends."""
    name, port = links.names[rank], f"port{rank}"
    _ip("netns", "add", name)
    cable = ("link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", name, *cable)
    _ip("-n", name, "addr", "add", f"{links.addresses[rank]}/24", "dev", INTERFACE)
    _ip("-n", switch, "link", "set", port, "master", "bridge")
    for where, device in ((name, INTERFACE), (name, "lo"), (switch, port)):
        _ip("-n", where, "link", "set", device, "up")
    limit = ("root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUED)
    for where, device in ((name, INTERFACE), (switch, port)):
        _run("tc", "-n", where, "qdisc", "add", "dev", device, *limit)


def remove(name: str) -> None:
    """Remove a namespace with all other processes in it, if it is there; its links go with it."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in {int(each) for each in found.stdout.split()} - {os.getpid()}:
        _kill(pid)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def remove_stale() -> None:
    """Remove the namespaces of processes that are no more."""
    for line in _ip("netns", "list").splitlines():
        found = re.match(rf"{PREFIX}(\d+)-", line)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            remove(line.split()[0])


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it may just have ended
        os.kill(pid, signal.SIGKILL)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        text = " ".join(command)
        raise LinksError(f"{text}: {found.stderr.strip() or f'ended with {found.returncode}'}")
    return found.stdout


def run(command: Sequence[str], links: Links) -> int:
    """Run a command on every rank; when one fails, the others are ended.

    Returns:
        0, or the exit status of the first rank found to have failed.
    """
    size = len(links.names)
    common = {
        **os.environ,
        **links.environment(),
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(size),
    }
    ranks = [
        subprocess.Popen(
            links.command(rank, command), env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(size)
    ]
    try:
        while True:
            codes = [each.poll() for each in ranks]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(0.05)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
