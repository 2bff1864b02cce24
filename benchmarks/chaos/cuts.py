"""Networks that are cut while a run on several hosts trains, for a while or for good.

Network namespaces stand for hosts, each with a rank and its launcher. At a moment drawn at random one is cut off.
The first host has the rendezvous: it must end well, with those that it can reach. A host that was cut off for good must
end, by itself.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import NamedTuple

from benchmarks.chaos.training import MOMENTS
from benchmarks.links import Links, slow_links
from weft.units import Seconds

SCRIPT = Path(__file__).with_name("training.py")
PORT = 29400
RATE = "1gbit"
# Seconds of a cut: nobody notices the first, all others may be taken for the loss of a host.
LENGTHS = (0.3, 3.0, 8.0, 20.0, inf)
UNNOTICED = 1.0
# Seconds of silence after which a rank counts as lost; and those that a run may take, in which a host that does not
# answer counts as gone after 30 s.
SILENCE, LIMIT = Seconds(4.0), Seconds(240.0)


@dataclass(frozen=True)
class Cut:
    """A cut in a run on several hosts.

    Attributes:
        number: of the cut, which all else is drawn by.
        hosts: of the run, with a rank each.
        host: that is cut off.
        rank, moment, count: who waits for the cut: the rank that comes to the moment for that time.
        seconds: after which the host is joined again; infinite where it is not.
    """

    number: int
    hosts: int
    host: int
    rank: int
    moment: str
    count: int
    seconds: float
    how: str = "cut"

    def __str__(self) -> str:
        lasts = "for good" if self.seconds == inf else f"for {self.seconds:g} s"
        return f"host {self.host} of {self.hosts} cut off {lasts} at {self.moment} {self.count}"


class Run(NamedTuple):
    """What became of a run.

    Attributes:
        code: of the launcher of the first host; -1 where a launcher did not end.
        others: codes of the other launchers.
        said: what all wrote.
        restarts: of the first host's ranks.
    """

    code: int
    others: tuple[int, ...]
    said: str
    restarts: int


def drawn_cut(number: int, seed: int) -> Cut:
    """The cut of a number."""
    draw = random.Random(f"cut {seed} {number}")
    hosts = draw.randint(2, 3)
    moment = draw.choice([each for each in MOMENTS if each != "load"])
    count = draw.randint(1, MOMENTS[moment])
    # The rank that waits for the cut need not be the one that is cut off.
    host, rank = draw.randrange(hosts), draw.randrange(hosts)
    return Cut(number, hosts, host, rank, moment, count, draw.choice(LENGTHS))


def run_cut(cut: Cut, folder: Path, variables: dict[str, str]) -> Run:
    """Make a run with a cut.

    Args:
        cut: of its network.
        folder: of the run, empty.
        variables: of its environment.

    Raises:
        LinksError: there can be no such networks here.
    """
    # JSON has no infinity.
    fault = {name: value for name, value in asdict(cut).items() if name != "seconds"}
    (folder / "fault.json").write_text(json.dumps(fault))
    environment = {
        **os.environ,
        **variables,
        "WEFT_SECRET": secrets.token_hex(32),
        "WEFT_TRANSPORT": "gloo",
    }
    with ExitStack() as stack:
        links = stack.enter_context(slow_links(cut.hosts, RATE))
        command = [sys.executable, "-m", "weft", "run", "-n", "1", "--nnodes", str(cut.hosts)]
        command += ["--rendezvous", f"{links.addresses[0]}:{PORT}", "--run-id", "chaos"]
        command += ["--restarts", "3", "--min-ranks", "1", "--timeout", str(SILENCE)]
        runs, files = [], []
        for host in range(cut.hosts):
            file = folder / f"said-{host}"
            files.append(file)
            runs.append(
                subprocess.Popen(
                    links.command(host, [*command, str(SCRIPT), str(folder)]),
                    env=environment,
                    stdout=stack.enter_context(file.open("w")),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        _watch(cut, folder, links, runs)
        late = [run for run in runs if run.poll() is None]
        for run in late:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
        codes = [run.wait() for run in runs]
    texts = [file.read_text() for file in files]
    said = "\n".join(f"[host {host}] {text}" for host, text in enumerate(texts))
    restarts = texts[0].count("restart ")
    return Run(-1 if late else codes[0], tuple(codes[1:]), said, restarts)


def _watch(cut: Cut, folder: Path, links: Links, runs: Sequence[subprocess.Popen[bytes]]) -> None:
    """Cut and join as the cut says, until all have ended, for `LIMIT` seconds at most."""
    until, begun = time.monotonic() + LIMIT, inf
    joined = False
    while any(run.poll() is None for run in runs) and time.monotonic() < until:
        if begun == inf and (folder / "done").exists():
            links.cut(cut.host)
            (folder / "cut").touch()
            begun = time.monotonic()
        if not joined and time.monotonic() - begun >= cut.seconds:
            links.join(cut.host)
            joined = True
        time.sleep(0.01)
