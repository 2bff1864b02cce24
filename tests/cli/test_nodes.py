"""`weft run` on several nodes, two launchers here: they meet at one address, and tell each other of failures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from cli.listening import family, listening
from strangers import needs_root, run_as_stranger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SECRET = "a secret that nobody can guess"

# Ranks that meet; each says that it has, and goes on when its input ends.
SCRIPT = """
import os, sys, threading
import torch
import torch.distributed as dist
from weft.runtime.world.distributed import current_world

rank, world = int(os.environ["RANK"]), current_world("cpu")
sums = torch.ones(2)
dist.all_reduce(sums)
sys.stdout.write(f"{rank} of {world.size} has {sums.tolist()}\\n")
sys.stdout.flush()
sys.stdin.read()
if sys.argv[1:]:
    if sys.argv[1] == str(rank):
        exec(sys.argv[2])
    world.gather({rank: ""})
world.gather({rank: ""})
"""

Node: TypeAlias = subprocess.Popen[str]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


@contextmanager
def node(folder: Path, address: str, *arguments: str, secret: str = SECRET) -> Iterator[Node]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    options = ["--nodes", "2", "--rendezvous", address, "--run-id", "a", "--timeout", "20"]
    command = [sys.executable, "-m", "weft", "run", "-n", "1", *options, str(script), *arguments]
    environment = {**os.environ, "WEFT_SECRET": secret}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as run:
        try:
            yield run
        finally:
            run.kill()


@contextmanager
def nodes(folder: Path, *arguments: str) -> Iterator[tuple[Node, Node]]:
    """Two nodes whose ranks have met."""
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        both = [stack.enter_context(node(folder, address, *arguments)) for _ in range(2)]
        lines = sorted(each.stdout.readline() for each in both if each.stdout)
        assert lines == [f"{rank} of 2 has [2.0, 2.0]\n" for rank in range(2)], lines
        yield both[0], both[1]


def ended(both: tuple[Node, Node]) -> list[tuple[int, str]]:
    """The exit code of each node, and what it wrote to stderr."""
    for each in both:
        assert each.stdin
        each.stdin.close()
        each.stdin = None
    errors = [each.communicate(timeout=100)[1] for each in both]
    return [(each.returncode, error) for each, error in zip(both, errors, strict=True)]


def test_ranks_of_two_nodes_meet_and_end_well(tmp_path: Path) -> None:
    with nodes(tmp_path) as both:
        assert ended(both) == [(0, ""), (0, "")]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise ValueError('boom')", "rank 1 failed: ValueError: boom"),
        pytest.param("os._exit(3)", "ended with exit code 3", marks=pytest.mark.thorough),
        ("os._exit(0)", "ended with exit code 0 while others still waited"),
    ],
)
def test_every_node_is_told_of_the_first_cause(tmp_path: Path, how: str, words: str) -> None:
    with nodes(tmp_path, "1", how) as both:
        for code, error in ended(both):
            assert code == 1
            assert "rank 1 " in error.partition(words)[0] + words
            assert words in error


def test_a_node_that_is_killed_is_told_of(tmp_path: Path) -> None:
    with nodes(tmp_path) as both:
        both[1].kill()
        _, error = both[0].communicate(timeout=60)
        assert both[0].returncode == 1
        assert "has gone" in error


def test_two_nodes_with_two_secrets_do_not_meet(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with node(tmp_path, address) as one, node(tmp_path, address, secret=SECRET[::-1]) as other:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # one of them
        refused = other if one.poll() is None else one
        _, error = refused.communicate(timeout=60)
        assert refused.returncode == 2
        assert "WEFT_SECRET to the same value on all nodes" in error


def test_without_a_secret_nothing_listens(tmp_path: Path) -> None:
    with node(tmp_path, f"127.0.0.1:{free_port()}", secret="") as one:
        _, error = one.communicate(timeout=60)
        assert one.returncode == 2
        assert "several nodes need a secret" in error


# All that one can do to a store without its secret: torch's client, junk, connections that stay open.
STRANGER = """
import json, os, signal, socket, sys
from datetime import timedelta
reached, held = [], []
for port in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        signal.alarm(5)
        try:
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=3))
            store.set("planted", "by a stranger")
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1] == 0:
        reached.append(port)
    for junk in (b"", bytes(5000), b'["set", "weft/launcher/failed", "planted"]'):
        tried = socket.socket()
        tried.connect(("127.0.0.1", port))
        held.append(tried)
        tried.sendall(junk)
print(json.dumps(reached))
"""


@needs_root
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc/net")
def test_a_stranger_neither_ends_a_job_nor_feeds_it(tmp_path: Path) -> None:
    with nodes(tmp_path) as both:
        kept = [port for each in both for host, port in listening({each.pid})[0]]
        every = [host for each in both for host, _ in listening(family(each.pid))[0]]
        assert len(kept) == 1
        assert set(every) == {"127.0.0.1"}
        imports = "from torch.distributed import TCPStore"
        assert json.loads(run_as_stranger(STRANGER, json.dumps(kept), imports=imports)) == []
        assert ended(both) == [(0, ""), (0, "")]
