"""Slurm: a controller and two nodes, each a host of its own, and the job file as users give it to sbatch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.links import Links
from recipes.checks.on_hosts import hosts
from recipes.harness import DIES_AT, RECIPES, ROOT, TRAIN, Missing, Work, Wrong

NODES = ("node1", "node2")
CONTROL = "control"
PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
}
# Seconds: for the daemons to come up, for the job, and between two looks.
UP, JOB, LOOK = 60.0, 240.0, 0.5
# Tokens of munge, and so credentials of steps, hold for this long; a job that is queued again waits for them to end.
EXPIRE = 5


def slurm(work: Work) -> str:
    """The job dies, is queued again, and goes on from its newest checkpoint."""
    _check()
    out = work.folder("slurm")
    with ExitStack() as stack:
        links = stack.enter_context(hosts(1 + len(NODES)))
        cluster = stack.enter_context(_cluster(work, links))
        output = work.out / "slurm-job.log"
        output.unlink(missing_ok=True)
        asked = ["--nodes", "2", "--output", str(output), str(RECIPES / "slurm" / "train.sbatch")]
        job = cluster.call(
            "sbatch", "--parsable", *asked, TRAIN, "--out", str(out), "--die-at", str(DIES_AT)
        )
        state = cluster.ended(job.strip())
        if state != ("COMPLETED", "1"):
            said = output.read_text()[-3000:] if output.exists() else "nothing"
            raise Wrong(f"the job is {state[0]} after {state[1]} restarts; it wrote\n{said}")
    return f"{work.losses(out, killed=True)}, queued again once"


@dataclass(frozen=True)
class Cluster:
    """A controller and its nodes.

    Attributes:
        links: the namespaces: the controller's, then those of the nodes.
        variables: of all its commands.
    """

    links: Links
    variables: dict[str, str]

    def call(self, *command: str) -> str:
        """Run a command of Slurm's beside the controller; gives what it wrote."""
        found = subprocess.run(
            _on(self.links, 0, CONTROL, command),
            cwd=ROOT,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=30,
        )
        if found.returncode:
            raise Wrong(f"{' '.join(command)}: {found.stderr}")
        return found.stdout

    def up(self) -> None:
        """Wait until all nodes are idle."""
        end = time.monotonic() + UP
        while True:
            try:
                states = self.call("sinfo", "--noheader", "--Node", "--format", "%T").split()
            except Wrong:
                states = []
            if states == ["idle"] * len(NODES):
                return
            if time.monotonic() > end:
                raise Wrong(f"the nodes are {states} after {UP:.0f} s; see the logs of slurmd")
            time.sleep(LOOK)

    def ended(self, job: str) -> tuple[str, str]:
        """Wait for the end of a job; gives its state and how often it was started again."""
        end = time.monotonic() + JOB
        while True:
            found = self.call("scontrol", "--oneliner", "show", "job", job)
            state, restarts = (_field(found, name) for name in ("JobState", "Restarts"))
            if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                return state, restarts
            if time.monotonic() > end:
                return state, restarts
            time.sleep(LOOK)


def _field(text: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", text)
    return found[1] if found else ""


def _check() -> None:
    there = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}["PATH"]
    missing = {PROGRAMS[name] for name in PROGRAMS if shutil.which(name, path=there) is None}
    if missing:
        raise Missing(
            f"Debian's {' and '.join(sorted(missing))}: apt-get install {' '.join(sorted(missing))}"
        )


def _on(links: Links, host: int, name: str, command: Sequence[str]) -> list[str]:
    """A command on a host, under a name of its own."""
    named = ["unshare", "--uts", "--", "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]
    return links.command(host, named)


@contextmanager
def _cluster(work: Work, links: Links) -> Iterator[Cluster]:
    """Daemons of munge and Slurm, which end with the block."""
    folder = work.folder("slurm-cluster")
    path = f"{work.variables['PATH']}:/usr/sbin:/sbin"
    conf = folder / "slurm.conf"
    variables = {**work.variables, "PATH": path, "SLURM_CONF": str(conf), "PYTHON": work.python}
    with _munge(variables) as socket, ExitStack() as stack:
        conf.write_text(_conf(folder, links, socket))
        # Nothing here uses it; looking for another version fails in a namespace.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        daemons = [(0, CONTROL, ["slurmctld", "-D"])]
        daemons += [(1 + n, name, ["slurmd", "-D"]) for n, name in enumerate(NODES)]
        for host, name, command in daemons:
            stack.enter_context(_daemon(_on(links, host, name, command), folder / name, variables))
        cluster = Cluster(links, variables)
        cluster.up()
        yield cluster


@contextmanager
def _munge(variables: dict[str, str]) -> Iterator[Path]:
    """A daemon by which all of the cluster know each other, with a key of its own; gives its socket."""
    folder = Path("/run") / f"weft-munge-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        socket = folder / "socket"
        files = {
            "key-file": key,
            "socket": socket,
            "pid-file": folder / "pid",
            "seed-file": folder / "seed",
        }
        files["log-file"] = folder / "log"
        options = [f"--{name}={path}" for name, path in files.items()]
        command = ["munged", "--foreground", "--force", *options]
        with _daemon(command, folder / "munged", variables):
            end = time.monotonic() + UP
            while not socket.exists():
                if time.monotonic() > end:
                    raise Wrong(f"munged did not start: {(folder / 'munged.log').read_text()}")
                time.sleep(LOOK)
            yield socket
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _daemon(command: Sequence[str], name: Path, variables: dict[str, str]) -> Iterator[None]:
    """A program that runs until the block ends; what it writes goes to `NAME.log`."""
    with name.with_name(f"{name.name}.log").open("w") as log:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _conf(folder: Path, links: Links, socket: Path) -> str:
    """The slurm.conf of the cluster."""
    control, *addresses = links.addresses
    nodes = "".join(
        f"NodeName={name} NodeAddr={address} NodeHostname={name} CPUs=1 State=UNKNOWN\n"
        for name, address in zip(NODES, addresses, strict=True)
    )
    return f"""ClusterName=recipes
SlurmctldHost={CONTROL}({control})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire={EXPIRE}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/linear
ReturnToService=2
{nodes}PartitionName=all Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
"""
