"""Processes that are started, watched and ended: small ones, which are no ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from weft.runtime.world import launch as module
from weft.runtime.world.launch import (
    Exit,
    Interrupts,
    LaunchResult,
    NodeProcesses,
    RemoteFailure,
    launch,
)

HEAD = "import os, signal, sys, threading\nrank = os.environ['RANK']\n"
WAIT = "threading.Event().wait()\n"


def ran(text: str, fleet: NodeProcesses | None = None, **options: Any) -> LaunchResult:
    command = [sys.executable, "-S", "-c", HEAD + text]
    return launch(command, fleet or NodeProcesses(2), dict(os.environ), **options)


def test_all_end_well() -> None:
    ending = ran("")
    assert not ending.failed
    assert sorted(each.rank for each in ending.exits) == [0, 1]


def test_each_process_finds_its_numbers(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
    told = "' '.join(os.environ[name] for name in NAMES.split())".replace("NAMES", repr(names))
    ran(f"open('{tmp_path}/' + rank, 'w').write({told})\n", NodeProcesses(2, 4, 6, 1, 2))
    assert (tmp_path / "4").read_text() == "4 0 6 2 1 2"
    assert (tmp_path / "5").read_text() == "5 1 6 2 1 2"


def test_cores_are_shared_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"open('{tmp_path}/threads', 'w').write(os.environ['OMP_NUM_THREADS'])\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    ran(text, NodeProcesses(1))
    assert (tmp_path / "threads").read_text() == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    ran(text, NodeProcesses(10**6 - (10**6 - 1)))
    assert int((tmp_path / "threads").read_text()) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("bad", ["0", "1"])
def test_ends_come_in_the_order_of_time(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.1)
    ending = ran(f"if rank == '{bad}': os._exit(3)\n{WAIT}")
    first, second = ending.exits
    assert (str(first.rank), first.code, first.asked) == (bad, 3, False)
    assert (second.code, second.asked) == (-15, True)
    assert first.nanoseconds < second.nanoseconds


def test_a_rank_that_ends_within_the_grace_was_not_asked() -> None:
    text = "if rank == '0': os._exit(3)\nimport time\ntime.sleep(0.2)\nos._exit(4)\n"
    assert [(each.code, each.asked) for each in ran(text).exits] == [(3, False), (4, False)]


@pytest.mark.parametrize("how", ["signal.signal(signal.SIGTERM, signal.SIG_IGN)\n", ""])
def test_no_process_outlasts_a_failure(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that does not obey nor one that is stopped."""
    monkeypatch.setattr(module, "SHUTDOWN_SECONDS", 0.5)
    stop = "" if how else "os.kill(os.getpid(), signal.SIGSTOP)\n"
    started = time.monotonic()
    ending = ran(f"{how}if rank == '0': os._exit(3)\n{stop}{WAIT}")
    assert time.monotonic() - started < 10
    assert ending.exits[1] == Exit(
        1,
        ending.exits[1].pid,
        -9 if how else -15,
        ending.exits[1].nanoseconds,
        asked=True,
        state="" if how else "T",
    )


def test_a_rank_that_still_runs_is_asked_where_it_has_a_handler(tmp_path: Path) -> None:
    """One that has none, as while it starts, is not ended by the question."""
    answer = f"lambda *_: open('{tmp_path}/' + rank, 'w').write('here')"
    text = f"if rank == '1': signal.signal(signal.SIGQUIT, {answer})\n"
    text += f"open('{tmp_path}/ready' + rank, 'w')\nwhile rank == '0' and not all("
    text += f"os.path.exists('{tmp_path}/ready' + each) for each in '12'): pass\n"
    ending = ran(
        f"{text}if rank == '0': os._exit(3)\n{WAIT}", NodeProcesses(3), asks=signal.SIGQUIT
    )
    assert sorted(each.code for each in ending.exits) == [-15, -15, 3]
    assert (tmp_path / "1").read_text() == "here"
    assert not (tmp_path / "2").exists()


def test_ranks_are_asked_when_another_node_has_failed(tmp_path: Path) -> None:
    events: SimpleQueue[Any] = SimpleQueue()
    path = tmp_path / "here"
    text = f"signal.signal(signal.SIGQUIT, lambda *_: open('{path}', 'w'))\n"
    text += "os.kill(os.getpid(), signal.SIGSTOP)\n"

    def told_once_it_listens() -> None:
        deadline = time.monotonic() + 20
        while not (stopped := _stopped(os.getpid())) and time.monotonic() < deadline:
            pass
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        events.put(RemoteFailure("node 1: boom"))

    thread = threading.Thread(target=told_once_it_listens)
    thread.start()
    ending = ran(text + WAIT, NodeProcesses(1), events=events, asks=signal.SIGQUIT)
    thread.join(20)
    assert ending.elsewhere == RemoteFailure("node 1: boom")
    assert path.exists()


def _stopped(parent: int) -> list[int]:
    """The children of a process that are stopped."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, of = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "T" and int(of) == parent:
            found.append(int(path.parent.name))
    return found


def test_the_usual_times_end_all_within_ten_seconds() -> None:
    assert module.SETTLE_SECONDS <= 2
    assert module.SETTLE_SECONDS + module.SHUTDOWN_SECONDS <= 10


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    child = "[sys.executable, '-S', '-c', 'import time; time.sleep(500)']"
    text = f"import subprocess\nchild = subprocess.Popen({child})\n"
    ran(
        f"{text}open('{tmp_path}/child', 'w').write(str(child.pid))\nos._exit(3)\n",
        NodeProcesses(1),
    )
    path = Path("/proc", (tmp_path / "child").read_text(), "stat")
    deadline = time.monotonic() + 20
    while path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline


def test_what_a_rank_started_serves_it_until_it_has_ended(tmp_path: Path) -> None:
    """As processes that load samples do while it writes its last checkpoint."""
    text = "import subprocess\nif rank == '0':\n"
    text += f"    while not os.path.exists('{tmp_path}/ready'): pass\n    os._exit(3)\n"
    text += "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
    text += "def end(*_):\n    said, _ = child.communicate(b'served')\n"
    text += f"    open('{tmp_path}/said', 'wb').write(said)\n    os._exit(0)\n"
    text += f"signal.signal(signal.SIGTERM, end)\nopen('{tmp_path}/ready', 'w')\n"
    assert [each.code for each in ran(text + WAIT).exits] == [3, 0]
    assert (tmp_path / "said").read_text() == "served"


def test_the_failure_of_another_node_ends_the_processes_here() -> None:
    events: SimpleQueue[Any] = SimpleQueue()
    events.put(RemoteFailure("node 1: boom"))
    ending = ran(WAIT, events=events)
    assert ending.failed
    assert ending.elsewhere == RemoteFailure("node 1: boom")
    assert all(each.asked for each in ending.exits)


def test_each_end_is_told() -> None:
    told: list[Exit] = []
    ending = ran("", tell=told.append)
    assert tuple(told) == ending.exits


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_interrupt_ends_the_processes() -> None:
    found: list[int] = []
    with Interrupts() as interrupts:
        text = f"if rank == '1': os.kill(os.getppid(), signal.SIGTERM)\n{WAIT}"
        with pytest.raises(KeyboardInterrupt):
            ran(text, tell=lambda end: found.append(end.pid), interrupts=interrupts)
    assert len(found) == 2
    assert not any(alive(pid) for pid in found)


@pytest.mark.parametrize("hurried", [False, True])
def test_an_interrupt_leaves_ranks_their_time(hurried: bool, tmp_path: Path) -> None:
    """They save in it; a second Ctrl-C ends them at once."""
    saved = f"lambda *_: (again(), open('{tmp_path}/' + rank, 'w').write('saved'), os._exit(0))"
    again = "os.kill(os.getppid(), signal.SIGINT), signal.pause()" if hurried else "None"
    text = f"again = lambda: ({again},)\nsignal.signal(signal.SIGTERM, {saved})\n"
    text += f"if rank == '1': os.kill(os.getppid(), signal.SIGTERM)\n{WAIT}"
    started = time.monotonic()
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        ran(text, NodeProcesses(2), interrupts=interrupts, grace=60.0)
    assert time.monotonic() - started < 30
    names = [path.name for path in tmp_path.iterdir()]
    assert names == [] if hurried else "1" in names


def test_an_interrupt_while_processes_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        found.append(popen(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return found[-1]

    monkeypatch.setattr("weft.runtime.world.launch.subprocess.Popen", start)
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        ran(WAIT, interrupts=interrupts)
    assert [process.returncode for process in found] == [-15, -15]


def test_an_interrupt_while_processes_end_keeps_the_cause_and_kills_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = module._send

    def interrupted(group: int, number: int) -> None:
        send(group, number)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, "SHUTDOWN_SECONDS", 0.5)
    monkeypatch.setattr(module, "_send", interrupted)
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    with Interrupts() as interrupts:
        ending = ran(f"{stubborn}if rank == '0': os._exit(3)\n{WAIT}", interrupts=interrupts)
    assert interrupts.heard
    assert [(end.rank, end.code, end.asked) for end in ending.exits] == [
        (0, 3, False),
        (1, -9, True),
    ]
    assert not any(alive(end.pid) for end in ending.exits)


def test_no_number_is_free_before_its_group_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another process could have it by then, and be killed."""
    taken: list[bool] = []
    send = module._send

    def looked(group: int, number: int) -> None:
        taken.append(Path(f"/proc/{group}").exists())
        send(group, number)

    monkeypatch.setattr(module, "_send", looked)
    ending = ran("os._exit(3)\n")
    assert taken == [True] * 2
    assert not any(Path(f"/proc/{end.pid}").exists() for end in ending.exits)


def test_ends_carry_the_time_of_a_clock_that_is_never_set() -> None:
    before = time.monotonic_ns()
    for end in ran("").exits:
        assert before < end.nanoseconds < time.monotonic_ns()
