"""SSH: two hosts with a daemon each, and the script that starts a launcher on both."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.links import Links
from recipes.checks.on_hosts import hosts
from recipes.harness import TRAIN, Missing, Work, Wrong

SSHD = "/usr/sbin/sshd"
UP, LOOK = 20.0, 0.2


def ssh(work: Work) -> str:
    """A rank on each of two hosts, started from the first."""
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        raise Missing("Debian's openssh-server: apt-get install openssh-server")
    out, keys = work.folder("ssh"), work.folder("ssh-keys")
    with ExitStack() as stack:
        links = stack.enter_context(hosts(2))
        config = _keys(keys)
        for host in range(2):
            stack.enter_context(_daemon(links, host, keys))
        start = ["recipes/ssh/start.sh", " ".join(links.addresses), "1", TRAIN, "--out", str(out)]
        exported = (f"{name}={work.variables[name]}" for name in ("PYTHONPATH", "OMP_NUM_THREADS"))
        given = {
            "SSH": f"ssh -F {config}",
            "PYTHON": work.python,
            "EXPORT": " ".join(exported),
        }
        work.run(links.command(0, start), "ssh", variables=given)
    return work.losses(out)


def _keys(folder: Path) -> Path:
    """Keys of the hosts and of the user; gives the client's configuration."""
    for name in ("host", "user"):
        made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(made, check=True, timeout=30)
    known = folder / "known"
    known.write_text(f"* {(folder / 'host.pub').read_text()}")
    config = folder / "config"
    config.write_text(
        f"Host *\n  User root\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  BatchMode yes\n"
        f"  UserKnownHostsFile {known}\n  StrictHostKeyChecking yes\n"
    )
    return config


@contextmanager
def _daemon(links: Links, host: int, keys: Path) -> Iterator[None]:
    """An SSH daemon on a host, until the block ends."""
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    config, log = keys / f"sshd-{host}", keys / f"sshd-{host}.log"
    config.write_text(
        f"ListenAddress {links.addresses[host]}\nHostKey {keys}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {keys}/user.pub\nStrictModes no\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\n"
    )
    with log.open("w") as written:
        command = links.command(host, [SSHD, "-D", "-e", "-f", str(config)])
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=written)
        try:
            end = time.monotonic() + UP
            while "listening on" not in log.read_text():
                if process.poll() is not None or time.monotonic() > end:
                    raise Wrong(f"the SSH daemon of host {host} did not start: {log.read_text()}")
                time.sleep(LOOK)
            yield
        finally:
            process.terminate()
            process.wait()
