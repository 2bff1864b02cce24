"""The addresses at which processes listen, as Linux tells."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path

# A flag of a Unix socket in /proc/net/unix.
LISTENS = 0x10000


def family(parent: int) -> set[int]:
    """A process and all those that it started, or that these started."""
    parents = dict(_parents())
    found = {parent}
    while new := {child for child, above in parents.items() if above in found} - found:
        found |= new
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue


def listening(processes: set[int]) -> tuple[list[tuple[str, int]], list[str]]:
    """TCP addresses and names of Unix sockets at which processes listen."""
    own = {inode for process in processes for inode in _sockets(process)}
    tcp = []
    for name in ("tcp", "tcp6"):
        for line in _lines(name):
            if line[3] == "0A" and line[9] in own:
                host, port = line[1].split(":")
                tcp.append((_address(host), int(port, 16)))
    unix = [
        line[7]
        for line in _lines("unix")
        if len(line) > 7 and line[6] in own and int(line[3], 16) & LISTENS
    ]
    return tcp, unix


def _lines(name: str) -> list[list[str]]:
    path = Path("/proc/net", name)
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _sockets(process: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
        except FileNotFoundError:
            continue
        if found:
            yield found[1]


def _address(text: str) -> str:
    """An address as the kernel writes it: words of four bytes, each the wrong way round."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
