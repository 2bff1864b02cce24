"""What the launcher of a node says, and when: to the other nodes, which are none here, and to its user."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from weft.cli import run
from weft.cli.failure import NOTES, OWN, TOLD, WAITED, Note
from weft.runtime.world import launch
from weft.runtime.world.launch import (
    SECRET,
    Exit,
    Interrupts,
    LaunchResult,
    NodeProcesses,
    RemoteFailure,
)


@dataclass
class Node:
    """Stands in for `Joined`: `said` holds what the others were told, `waited` how long for what they had to say.

    `before` is what another node had told first, `late` what one tells later.
    """

    before: RemoteFailure | None = None
    late: RemoteFailure | None = None
    said: list[str] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    fleet: NodeProcesses = field(default_factory=lambda: NodeProcesses(2, 0, 4, 0, 2))
    environment: dict[str, str] = field(default_factory=lambda: {**os.environ, SECRET: "x"})
    events: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    def say_ended(self, end: Exit) -> None:
        self.said.append(f"{end.rank} ended")

    def left(self) -> tuple[int, ...]:
        return ()

    def say_failed(self, text: str) -> RemoteFailure | None:
        self.said.append(text)
        return self.before

    def failure(self, seconds: float) -> RemoteFailure | None:
        self.waited.append(seconds)
        return self.late


def noted(folder: Path, rank: int, kind: str) -> Exit:
    """The end of a rank that has left a note."""
    note = Note(rank, time.monotonic_ns(), f"ValueError: {rank}", "Traceback", kind)
    (folder / f"{rank}.json").write_text(json.dumps(asdict(note)))
    return Exit(rank, 100 + rank, 1, time.monotonic_ns())


def told(node: Node, folder: Path, exits: Sequence[Exit], capfd: pytest.CaptureFixture[str]) -> str:
    """What the user is told of a node whose ranks have ended so."""
    reports = run._Reports(node, folder)
    for end in exits:
        reports.end(end)
    assert run._told(LaunchResult(tuple(exits), reports.first_elsewhere(exits)), folder) == 1
    return capfd.readouterr().err


# A rank that fails, and one that does not obey.
RANKS = f"""
import json, os, signal, sys, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.environ["RANK"]
if rank == "1":
    open(sys.argv[1], "w").close()
    threading.Event().wait()
while not os.path.exists(sys.argv[1]):
    pass
note = dict(rank=0, nanoseconds=time.monotonic_ns(), title="ValueError: boom", text="", kind="{OWN}")
with open(os.environ["{NOTES}"] + "/0.json", "w") as opened:
    opened.write(json.dumps(note))
os._exit(1)
"""


def test_the_other_nodes_hear_of_a_failure_before_all_ranks_here_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(launch, "SHUTDOWN_SECONDS", 0.3)
    node = Node()
    command = [sys.executable, "-S", "-c", RANKS, str(tmp_path / "stubborn")]
    code = run._run_node(command, node, {NOTES: str(tmp_path)}, tmp_path, Interrupts())
    assert code == 1
    assert node.said == ["0 ended", "rank 0 failed: ValueError: boom", "1 ended"]
    assert "weft run: rank 0 failed: ValueError: boom" in capfd.readouterr().err


@pytest.mark.parametrize("kind", [WAITED, TOLD])
def test_a_node_that_only_waited_lets_another_one_say_why(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = Node(late=RemoteFailure("node 1 (b): rank 3 failed: ValueError: 3"))
    text = told(node, tmp_path, [noted(tmp_path, 0, kind)], capfd)
    assert text.startswith("weft run: node 1 (b): rank 3 failed: ValueError: 3\n\nall ranks were")
    assert node.said == ["0 ended"]
    assert node.waited == [run.TOLD_SECONDS]
    # As long as another node takes to end its own ranks, which tells it who did not answer.
    assert run.TOLD_SECONDS > launch.SETTLE_SECONDS + 2 * launch.SHUTDOWN_SECONDS


def test_where_no_other_node_says_why_this_one_says_what_it_knows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = Node()
    assert "rank 0 failed" in told(node, tmp_path, [noted(tmp_path, 0, WAITED)], capfd)
    assert node.said == ["0 ended", "rank 0 failed: ValueError: 0"]


def test_a_node_whose_rank_did_not_answer_says_so_without_waiting(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node, hung = Node(), Exit(1, 101, -15, asked=True)
    exits = [noted(tmp_path, 0, WAITED), hung]
    assert "rank 1 (process 101) did not answer" in told(node, tmp_path, exits, capfd)
    assert node.waited == [0.0]
    assert node.said[2].startswith("rank 1 (process 101) did not answer")


def test_the_failure_that_was_told_first_stands_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = Node(before=RemoteFailure("node 1 (b): rank 3 failed"))
    exits = [noted(tmp_path, 0, OWN), noted(tmp_path, 1, OWN)]
    text = told(node, tmp_path, exits, capfd)
    assert text.startswith("weft run: node 1 (b): rank 3 failed\n\nrank 0 failed: ValueError: 0")
    assert node.said == ["0 ended", "rank 0 failed: ValueError: 0", "1 ended"]


@pytest.fixture
def _harmless() -> Iterator[None]:
    """A signal that the launcher does not take fails the test, and ends nothing."""

    def missed(number: int, _frame: object) -> None:
        raise AssertionError(f"nobody has taken {number}")

    before = {number: signal.signal(number, missed) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_harmless")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_between_two_starts_leaves_nothing_and_starts_nothing(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The cause of a failure is told although the signal comes after it."""
    starts: list[NodeProcesses] = []

    def failed(command: Sequence[str], fleet: NodeProcesses, *_: Any, **__: Any) -> LaunchResult:
        starts.append(fleet)
        signal.raise_signal(number)
        return LaunchResult((Exit(1, 101, 3),))

    monkeypatch.setattr(run, "launch", failed)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = run.run_script(Path("script.py"), (), run.RunOptions(2, restarts=3))
    assert (code, len(starts)) == (run.INTERRUPTED, 1)
    assert "rank 1 (process 101) ended with exit code 3" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
