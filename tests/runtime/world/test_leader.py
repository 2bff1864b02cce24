"""Ranks that are left are led on in place, or not: small processes, which say over their lines what real ones would."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from weft.runtime.world import launch as launching
from weft.runtime.world import leader as module
from weft.runtime.world.launch import Ending, Exit, Fleet, launch
from weft.runtime.world.leader import Leader, Starts

pytestmark = pytest.mark.timeout(60)

# A rank of the first start, which goes on once all are there; one of a later start waits for two that go on in place.
HEAD = """
import json, os, signal, socket, sys
line = socket.socket(fileno=int(os.environ['WEFT_LINE'])).makefile('rw')
first = int(os.environ['RANK'])
new = os.environ['START'] == '1'

def say(word, text=''):
    line.write(json.dumps([word, text]) + '\\n')
    line.flush()

def hear():
    return json.loads(line.readline())

def write(text):
    with open(os.environ['OUT'], 'a') as out:
        out.write(text + '\\n')

def go_on():
    assert hear()[0] == 'stop'
    say('ready')
    word, text = hear()
    assert word == 'go', word
    found = json.loads(text)
    write(f"{first} is {found['RANK']} of {found['WORLD_SIZE']} in {found['START']}")
    sys.exit(0)

def fail(answers=True):
    while (word := hear()[0]) == 'stop':
        say('ready' if answers else 'inside')
    write(f'{first} restarts' if word == 'restart' else f'{first} goes on')
    os._exit(4)

def meet():
    open(os.environ['OUT'] + f'.{first}', 'w').close()
    while not all(os.path.exists(os.environ['OUT'] + f'.{rank}') for rank in range(3)):
        os.sched_yield()

def kill():
    signal.raise_signal(signal.SIGKILL)

say('inside')
if new:
    write(f'{first} is new of {os.environ["WORLD_SIZE"]}')
    while open(os.environ['OUT']).read().count(' in 1') < 2:
        os.sched_yield()
    sys.exit(0)
meet()
"""


class Job:
    """A run of small ranks under a leader.

    Args:
        folder: for what they write.
    """

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.told: list[str] = []
        self.seen: list[list[tuple[int, int, bool]]] = []
        # Of the first ends, whether they were a rank's own failure.
        self.own = False
        self.starts = Starts(3, 2)

    def cause(self, exits: Sequence[Exit], notes: Mapping[int, str]) -> str | None:
        self.seen.append([(each.rank, each.code, each.asked) for each in exits])
        return None if self.own else f"rank {exits[0].rank} was lost\n\nand more {dict(notes)}"

    def run(self, text: str) -> Ending:
        environment = {**os.environ, "START": "0", "OUT": str(self.out)}
        leader = Leader(
            self.starts,
            lambda number: {"START": str(number)},
            self.cause,
            self.told.append,
            signal.SIGQUIT,
        )
        command = [sys.executable, "-S", "-c", HEAD + text]
        return launch(command, Fleet(self.starts.ranks), environment, lead=leader)

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.read_text().splitlines()) if self.out.exists() else []


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    # On a busy machine; all that is waited for comes.
    monkeypatch.setattr(launching, "SETTLE_SECONDS", 20.0)
    monkeypatch.setattr(module, "HEARD_SECONDS", 20.0)
    return Job(tmp_path)


def test_a_new_process_takes_the_place_of_a_lost_one(job: Job) -> None:
    ending = job.run("if first == 1: kill()\ngo_on()\n")
    assert not ending.failed
    assert job.lines == ["0 is 0 of 3 in 1", "1 is new of 3", "2 is 2 of 3 in 1"]
    assert job.starts.number == 1
    assert job.told == ["rank 1 was lost\n\nand more {}"]
    assert job.seen == [[(1, -9, False)]]


def test_the_ranks_that_are_left_get_new_numbers(job: Job) -> None:
    job.starts = Starts(3, 2, least=2)
    assert not job.run("if first == 1: kill()\ngo_on()\n").failed
    assert job.lines == ["0 is 0 of 2 in 1", "2 is 1 of 2 in 1"]
    assert (job.starts.number, job.starts.ranks) == (1, 2)


def test_a_rank_that_does_not_answer_the_others_is_lost(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.3)
    job.starts = Starts(3, 1, least=1)
    text = "if first == 2: os.kill(os.getpid(), signal.SIGSTOP)\nsay('failed', f'by {first}')\ngo_on()\n"
    assert not job.run(text).failed
    assert job.lines == ["0 is 0 of 2 in 1", "1 is 1 of 2 in 1"]
    assert job.seen == [[(2, -9, True)]]
    assert "'by 0'" in job.told[0].replace('"', "'")


def test_processes_of_a_lost_rank_end_with_it(job: Job) -> None:
    text = "if first == 1:\n    if os.fork():\n        kill()\n    write(str(os.getpid()))\n"
    text += "    signal.pause()\ngo_on()\n"
    job.starts = Starts(3, 1, least=2)
    assert not job.run(text).failed
    for pid in (line for line in job.lines if line.isdigit()):
        end = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
            pass
        assert not Path(f"/proc/{pid}").exists()


def restarts(job: Job, text: str, who: str = "02") -> Ending:
    """All ranks that are left are told that they start again."""
    ending = job.run(text)
    assert ending.failed
    assert not job.told
    assert job.starts.number == 0
    # A new process may have come before it was ended.
    assert [line for line in job.lines if "new" not in line] == [f"{rank} restarts" for rank in who]
    return ending


def test_a_failure_of_a_rank_s_own_restarts_all(job: Job) -> None:
    job.own = True
    assert restarts(job, "if first == 1: os._exit(3)\nfail()\n").exits[0].code == 3


def test_a_rank_that_is_not_inside_restarts_all(job: Job) -> None:
    text = "if first == 0:\n    say('outside')\n    os.kill(OTHER, 9)\nfail()\n"
    text = text.replace("OTHER", "int(open(os.environ['OUT'] + '.pid').read())")
    wait = "if first == 1:\n    with open(os.environ['OUT'] + '.made', 'w') as out:\n"
    wait += (
        "        out.write(str(os.getpid()))\n    os.rename(out.name, os.environ['OUT'] + '.pid')\n"
    )
    wait += "    signal.pause()\nwhile not os.path.exists(os.environ['OUT'] + '.pid'): pass\n"
    restarts(job, wait + text)


def test_a_lost_rank_that_had_left_restarts_all(job: Job) -> None:
    """As `sys.exit` in its work does."""
    restarts(job, "if first == 1:\n    say('outside')\n    os._exit(3)\nfail()\n")


def test_fewer_than_are_needed_restart(job: Job) -> None:
    job.starts = Starts(3, 1, least=3)
    restarts(job, "if first == 1: kill()\nfail()\n")


def test_no_restart_is_left(job: Job) -> None:
    job.starts = Starts(3, 0)
    restarts(job, "if first == 1: kill()\nfail()\n")


def test_a_rank_whose_old_world_does_not_end_restarts_all(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.4)
    ending = restarts(job, "if first == 1: kill()\nfail(answers=first == 0)\n")
    assert ending.exits[0].code == -9


def test_a_rank_that_cannot_go_on_restarts_all(job: Job) -> None:
    text = "if first == 1: kill()\nassert hear()[0] == 'stop'\n"
    restarts(job, text + "say('cannot' if first else 'ready', 'a thread')\nfail()\n")


def test_a_second_loss_on_the_way_restarts_all(job: Job) -> None:
    text = "if first == 1: kill()\nassert hear()[0] == 'stop'\nif first == 2: kill()\nsay('ready')\nfail()\n"
    ending = restarts(job, text, "0")
    assert [(each.rank, each.code) for each in ending.exits] == [(1, -9), (2, -9), (0, 4)]


def test_all_wait_and_nobody_is_silent(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ranks make different calls: no rank can be left out."""
    monkeypatch.setattr(module, "SILENT_SECONDS", 5.0)
    restarts(job, "say('failed', 'x')\nfail()\n", "012")


@pytest.mark.parametrize(
    ("starts", "then"),
    [(Starts(4, 2), (4, 1)), (Starts(4, 2, 3), (3, 1)), (Starts(2, 2, 2), (2, 1))],
)
def test_the_next_start(starts: Starts, then: tuple[int, int]) -> None:
    starts.begin_next()
    assert (starts.ranks, starts.number) == then
    assert starts.left
    starts.begin_next()
    assert not starts.left
