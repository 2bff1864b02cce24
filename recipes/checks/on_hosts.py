"""torchrun and `weft run`, on this host and on several: network namespaces stand for hosts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.links import INTERFACE, Links, LinksError, slow_links
from recipes.harness import DIES_AT, TRAIN, Missing, Work

PORT = 29400
DIES = ("--die-at", str(DIES_AT))
# torchrun keeps one store over all starts, in which ranks may find addresses of ranks that have died.
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def weft_run(work: Work) -> str:
    """Two ranks of this host, started again by `weft run` when one dies."""
    out = work.folder("weft-run")
    start = [work.python, "-m", "weft", "run", "-n", "2", "--restarts", "1"]
    work.run([*start, TRAIN, "--out", str(out), *DIES], "weft-run")
    return work.losses(out, killed=True)


def torchrun(work: Work) -> str:
    """Two ranks of this host, started again by torchrun when one dies."""
    out = work.folder("torchrun")
    start = [work.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, "--max-restarts", "1", TRAIN, "--out", str(out), *DIES]
    work.run(command, "torchrun", variables=NEW_STORES)
    return work.losses(out, killed=True)


def weft_run_on_hosts(work: Work) -> str:
    """`weft run` on two hosts: one dies, all end, and the same command is given again on both."""
    out = work.folder("weft-run-hosts")
    secret = {"WEFT_SECRET": secrets.token_hex(32)}
    with hosts(2) as links:
        place = f"{links.addresses[0]}:{PORT}"
        for number in range(2):
            start = [work.python, "-m", "weft", "run", "-n", "1", "--nnodes", "2"]
            meet = ["--rendezvous", place, "--run-id", f"gpt.{number}"]
            command = [*start, *meet, TRAIN, "--out", str(out), *DIES]
            commands = [links.command(host, command) for host in range(2)]
            ends = 0 if number else None
            work.together(commands, f"weft-run-hosts-{number}", ends=ends, variables=secret)
    return work.losses(out, killed=True)


def torchrun_on_hosts(work: Work) -> str:
    """A rank on each of two hosts, by torchrun, which starts the ranks of both again when one dies."""
    out = work.folder("torchrun-hosts")
    with hosts(2) as links:
        start = [
            work.python,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
        ]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{links.addresses[0]}:{PORT}"]
        commands = []
        for host, address in enumerate(links.addresses):
            own = [
                "--rdzv-id",
                "gpt",
                "--rdzv-conf",
                f"is_host={not host}",
                "--local-addr",
                address,
            ]
            command = [*start, *meet, *own, "--max-restarts", "1", TRAIN, "--out", str(out), *DIES]
            commands.append(links.command(host, command))
        own_link = {"GLOO_SOCKET_IFNAME": INTERFACE}
        work.together(commands, "torchrun-hosts", variables={**own_link, **NEW_STORES})
    return work.losses(out, killed=True)


@contextmanager
def hosts(count: int) -> Iterator[Links]:
    """Network namespaces on a bridge.

    Raises:
        Missing: they cannot be made here.
    """
    try:
        with slow_links(count, "1gbit") as links:
            yield links
    except LinksError as error:
        raise Missing(str(error)) from error
