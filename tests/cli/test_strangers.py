"""Another user of the host beside a job of `weft run -n 2`: what he can reach of it, and what he can do to it."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.listening import family, listening
from strangers import needs_root, run_as_stranger
from weft.runtime.failures.failure_store import failure_key

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc/net"),
]

# Makes groups one after the other, says where it meets the other ranks, waits until its input ends,
# and talks to the others over everything that there is.
RANK = """
import json, os, sys
import torch
import torch.distributed as dist
from weft.runtime.world.distributed import current_world

dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
dist.barrier()
dist.destroy_process_group()
world = current_world("cpu")
known = {name: os.environ.get(name, "") for name in ("WEFT_MEETING", "NCCL_SOCKET_IFNAME")}
sys.stdout.write(json.dumps(known) + "\\n")
sys.stdout.flush()
sys.stdin.read()
shared, sockets = torch.ones(2), torch.ones(2)
world._everyone.all_reduce([shared], "sum")
dist.all_reduce(sockets)
world.gather({world.rank: "same"})
found = {"sums": [*shared.tolist(), *sockets.tolist()], "failed": world._board.failed}
sys.stdout.write(json.dumps(found) + "\\n")
"""

# Opens all that can be opened, writes everywhere, and plants code where torch's agent unpickles.
STRANGER_IMPORTS = """
import base64, json, os, pickle, signal, socket, sys
from torch.distributed import TCPStore
"""
STRANGER = """
ports, sockets, meeting, marker, failure_key = json.loads(sys.argv[1])
reached = []

class Planted:
    def __reduce__(self):
        return os.system, (f"id > {marker}",)

def plant(port):
    store = TCPStore("127.0.0.1", port, is_master=False)
    store.set("planted", "by a stranger")
    for key in store.list_keys():
        if "torch.rendezvous" in key:
            store.set(key, base64.b64encode(pickle.dumps(Planted())))
        if key.endswith("weft/host/0"):
            failure = key.removesuffix("weft/host/0") + failure_key
            store.compare_set(failure, "", "1 RuntimeError: planted")

# What is no store may never answer, so each has a process that the alarm ends.
children = {}
for port in ports:
    children[port] = os.fork()
    if not children[port]:
        signal.alarm(3)
        try:
            plant(port)
            os._exit(0)
        finally:
            os._exit(1)
for address in sockets:
    with socket.socket(socket.AF_UNIX) as tried:
        tried.settimeout(2)
        try:
            tried.connect(address.replace("@", "\\0", 1))
            tried.sendall(bytes(8))
            if tried.recv(1):
                reached.append(f"socket {address}")
        except OSError:
            pass
for port, child in children.items():
    if os.waitpid(child, 0)[1] == 0:
        reached.append(f"store at {port}")
for path in (os.path.dirname(meeting), meeting + ".0"):
    if meeting and os.access(path, os.R_OK):
        reached.append(path)
print(json.dumps(reached))
"""


@dataclass(frozen=True)
class Job:
    """What was seen of a job.

    Attributes:
        addresses: at which its processes listen.
        nccl: the interface of NCCL, which this host may not have.
        reached: what the stranger could open.
        planted: whether his code was run.
        code: the exit code of `weft run`.
        sums: what the ranks computed afterwards.
        failed: whether they heard of a failure of the job.
        errors: what was written to stderr.
    """

    addresses: tuple[str, ...]
    nccl: str
    reached: tuple[str, ...]
    planted: bool
    code: int
    sums: tuple[list[float], ...]
    failed: tuple[bool, ...]
    errors: str


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One job, and one stranger who does all that he can; only root can send one."""
    folder = tmp_path_factory.mktemp("job")
    script, marker = folder / "rank.py", folder / "marker"
    script.write_text(RANK)
    command = [sys.executable, "-m", "weft", "run", "-n", "2", str(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as run:
        try:
            ready = [json.loads(run.stdout.readline()) for _ in range(2)]
            tcp, unix = listening(family(run.pid))
            places = [[port for _, port in tcp], unix, ready[0]["WEFT_MEETING"]]
            tried = json.dumps([*places, str(marker), failure_key(0, 0)])
            reached = "[]"
            if os.geteuid() == 0:
                reached = run_as_stranger(STRANGER, tried, imports=STRANGER_IMPORTS)
            output, errors = run.communicate(timeout=200)
        finally:
            run.kill()
    ends = [json.loads(line) for line in output.splitlines()]
    sums, failed = (tuple(end[name] for end in ends) for name in ("sums", "failed"))
    addresses = tuple(f"{host}:{port}" for host, port in tcp)
    seen = (addresses, ready[0]["NCCL_SOCKET_IFNAME"], tuple(json.loads(reached)))
    return Job(*seen, marker.exists(), run.returncode, sums, failed, errors)


def test_a_job_listens_on_the_loopback_interface_only(job: Job) -> None:
    assert len(job.addresses) >= 2  # Gloo's, one a rank: the list is not empty for want of rights
    for address in job.addresses:
        assert ipaddress.ip_address(address.rpartition(":")[0]).is_loopback, address
    assert job.nccl == "=lo"


@needs_root
def test_a_stranger_reaches_no_store(job: Job) -> None:
    assert job.reached == ()


@needs_root
def test_nothing_is_unpickled_that_a_stranger_wrote(job: Job) -> None:
    assert not job.planted


@needs_root
def test_a_job_goes_on_whatever_a_stranger_does(job: Job) -> None:
    assert job.code == 0, job.errors
    assert job.sums == ([2.0] * 4, [2.0] * 4)
    assert job.failed == (False, False)
