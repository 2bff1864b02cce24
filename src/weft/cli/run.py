"""`weft run`: start a script on every rank and report the first failure."""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from rich.console import Console
from rich.text import Text

from weft.cli.failure import (
    ASKS,
    NOTES,
    absent,
    describe,
    own_failure,
    read_notes,
    read_stack_dumps,
)
from weft.runtime.world.launch import (
    LAUNCHER,
    MEETING,
    RESTART,
    SECRET,
    SETTLE_SECONDS,
    SHUTDOWN_SECONDS,
    TIMEOUT,
    Exit,
    Interrupts,
    LaunchResult,
    NodeProcesses,
    RemoteFailure,
    launch,
)
from weft.runtime.world.launchers import JoinedNode, Launchers, Nodes, launchers
from weft.units import counted

WORKER = "weft.cli.worker"
INTERRUPTED = 130
# Folders of runs; in each a file that its launcher has locked as long as it lives.
_PREFIX, _LOCK = "weft-run-", "launcher.lock"
# A node whose ranks have only waited is told by another one within so many seconds who did not answer.
TOLD_SECONDS = SETTLE_SECONDS + 2 * SHUTDOWN_SECONDS + 1.0


@final
@dataclass(frozen=True)
class RunOptions:
    """The processes of a run.

    Attributes:
        ranks: processes on this node.
        nodes: how the nodes find each other; None if this is the only one.
        timeout: seconds that a rank waits for another one; None for the usual ones.
        restarts: how many times the ranks are started again after one has failed.
        least: ranks that a restart needs. On one node each has one fewer than before, as long as there are so many; of
            several nodes it continues without those that have gone. None for as many as before.
        grace: seconds that ranks have to end after SIGTERM or Ctrl-C.
    """

    ranks: int
    nodes: Nodes | None = None
    timeout: float | None = None
    restarts: int = 0
    least: int | None = None
    grace: float = SHUTDOWN_SECONDS


def run_script(script: Path, arguments: Sequence[str], options: RunOptions) -> int:
    """Run `script` on every rank of this node.

    Returns:
        the exit code of the command: 0 when every rank ended well, 130 when interrupted, else 1.

    Raises:
        UserError: the nodes cannot meet.
    """
    command = [sys.executable, "-u", "-m", WORKER, str(script), *arguments]
    with Interrupts() as interrupts, _nothing_of_torch_s():
        if options.nodes is not None:
            return _run_with_nodes(command, options, options.nodes, interrupts)
        ranks, number = options.ranks, 0
        while True:
            code = _run_once(command, options, ranks, number, interrupts)
            if code and interrupts.heard:
                return INTERRUPTED
            if not code or number == options.restarts:
                return code
            number += 1
            ranks = ranks if options.least is None else max(options.least, ranks - 1)
            _say(f"restart {number} of {options.restarts}, on {counted(ranks, 'rank')}")


def _run_with_nodes(
    command: Sequence[str], options: RunOptions, nodes: Nodes, interrupts: Interrupts
) -> int:
    """Start the ranks of this node together with those of others, as often as it takes; gives the exit code."""
    with ExitStack() as stack:
        try:
            with interrupts.raised():
                job = stack.enter_context(launchers(nodes))
        except KeyboardInterrupt:
            return _interrupted()
        while True:
            number, code = _run_joined(command, options, job, interrupts)
            if code and interrupts.heard:
                job.finish_job()
                return INTERRUPTED
            if not code or number >= options.restarts or not job.again(number):
                return code
            _say(f"restart {number + 1} of {options.restarts}, with the nodes that join")


def _run_joined(
    command: Sequence[str], options: RunOptions, job: Launchers, interrupts: Interrupts
) -> tuple[int, int]:
    """Meet the other nodes and start the ranks of this one; gives the number of the start, and the exit code."""
    with _run_folder() as folder:
        number = 0
        try:
            with _rendezvous(job, options, interrupts) as node:
                number = node.start
                environment = _environment(folder, number, options)
                return number, _run_node(
                    command, node, environment, folder, interrupts, options.grace
                )
        except KeyboardInterrupt:
            return number, _interrupted()


def _run_once(
    command: Sequence[str], options: RunOptions, ranks: int, number: int, interrupts: Interrupts
) -> int:
    """Start so many ranks for that time; gives the exit code."""
    with _run_folder() as folder:
        environment = {**_environment(folder, number, options), **_alone(folder)}
        try:
            ending = launch(
                *(command, NodeProcesses(ranks), environment),
                interrupts=interrupts,
                asks=ASKS,
                grace=options.grace,
            )
            return _told(ending, folder)
        except KeyboardInterrupt:
            return _interrupted()


def _environment(folder: Path, number: int, options: RunOptions) -> dict[str, str]:
    """The variables of all ranks of a start."""
    found = {**os.environ, NOTES: str(folder), LAUNCHER: str(os.getpid()), RESTART: str(number)}
    return found if options.timeout is None else {**found, TIMEOUT: str(options.timeout)}


def _interrupted() -> int:
    _say("interrupted: all ranks were stopped")
    return INTERRUPTED


@contextmanager
def _run_folder() -> Iterator[Path]:
    """A folder for files of this run, for this user alone; those that killed launchers have left go before."""
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or another launcher takes it away
            if left.lstat().st_uid == os.geteuid() and not left.is_symlink():
                _remove_unused(left)
    # It has its name only when it is locked.
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
    try:
        with (made / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = made.rename(made.with_name(made.name[1:]))
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    """Take away a folder of a run, unless its launcher lives; one without a lock was left on the way."""
    with ExitStack() as stack:
        if (folder / _LOCK).exists():
            lock = stack.enter_context((folder / _LOCK).open("r+"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _nothing_of_torch_s() -> Iterator[None]:
    """Take away the folder that torch makes when it is imported, unless it was there before or something is in it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # torch, too, takes the number then
        user = f"uid_{os.getuid()}"
    made = Path(tempfile.gettempdir(), f"torchinductor_{user}")
    before = made.exists()
    try:
        yield
    finally:
        if not before:
            with suppress(OSError):
                made.rmdir()


@contextmanager
def _rendezvous(
    job: Launchers, options: RunOptions, interrupts: Interrupts
) -> Iterator[JoinedNode]:
    """`joined`, of which only the wait for the other nodes is interrupted."""
    with ExitStack() as stack:
        with interrupts.raised():
            node = stack.enter_context(job.joined(options.ranks, options.least))
        host, port = job.nodes.address.rsplit(":", 1)
        address = {"MASTER_ADDR": host, "MASTER_PORT": port}
        yield replace(node, environment={**address, **node.environment})


def _run_node(
    command: Sequence[str],
    node: JoinedNode,
    environment: Mapping[str, str],
    folder: Path,
    interrupts: Interrupts,
    grace: float = SHUTDOWN_SECONDS,
) -> int:
    """Start the ranks of this node; gives the exit code."""
    own = {**node.environment, **environment, SECRET: node.environment[SECRET]}
    reports = _Reports(node, folder)
    ending = launch(
        *(command, node.fleet, own, node.events, reports.end, interrupts, ASKS), grace=grace
    )
    if not ending.failed:
        with interrupts.raised():
            ending = LaunchResult(ending.exits, node.finish())
    elif ending.elsewhere is None:
        ending = LaunchResult(ending.exits, reports.first_elsewhere(ending.exits))
    return _told(ending, folder, node.left())


@final
class _Reports:
    """Tells the other nodes of the ends of ranks here, and at once of a failure that nobody else has caused."""

    def __init__(self, node: JoinedNode, folder: Path) -> None:
        self._node, self._folder = node, folder
        self._exits: list[Exit] = []
        # True if the others know of a failure here, and what one of them had told before.
        self._said = False
        self._before: RemoteFailure | None = None

    def end(self, end: Exit) -> None:
        """A rank has ended."""
        self._node.say_ended(end)
        self._exits.append(end)
        if end.code and not self._said:
            own = own_failure(self._exits, read_notes(self._folder))
            if own is not None:
                self._say(own)

    def first_elsewhere(self, exits: Sequence[Exit]) -> RemoteFailure | None:
        """The failure of another node that came before those of this one, once all ranks here have ended."""
        if not self._said:
            left = self._node.left()
            self._before = self._node.failure(0.0 if absent(exits, left) else TOLD_SECONDS)
            if self._before is None:
                notes, places = read_notes(self._folder), read_stack_dumps(self._folder)
                self._say(describe(exits, notes, left, places))
        return self._before

    def _say(self, text: str) -> None:
        self._said, self._before = True, self._node.say_failed(text.splitlines()[0])


def _alone(folder: Path) -> dict[str, str]:
    """Have the ranks meet in a file, and talk over the loopback interface where they use sockets.

    Nobody listens at MASTER_PORT, which is free; scripts may.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = asked.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        MEETING: str(folder / "meeting"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        # This name, not all that begin so.
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", f"={loopback}"),
    }


def _told(ending: LaunchResult, folder: Path, left: Sequence[int] = ()) -> int:
    """Say what failed; gives the exit code. `left` is that of `describe`."""
    if not ending.failed:
        return 0
    notes = read_notes(folder)
    if ending.elsewhere is None:
        text = describe(ending.exits, notes, left, read_stack_dumps(folder))
    else:
        own = own_failure(ending.exits, notes)
        places = read_stack_dumps(folder).items()
        where = "; ".join(f"rank {rank} was at {place}" for rank, place in sorted(places)[:3])
        text = "\n\n".join(filter(None, (ending.elsewhere.text, own, where)))
    _say(f"{text}\n\nall ranks were stopped")
    return 1


def _say(message: str) -> None:
    # Text: brackets in a traceback are not markup. Soft wrap: it may be longer than the terminal is
    # wide.
    Console(stderr=True).print(Text(f"weft run: {message}"), soft_wrap=True)
