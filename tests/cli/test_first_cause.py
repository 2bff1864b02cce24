"""Ways in which a rank of `weft run` ends or hangs: the right rank and reason are named soon, and nothing is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# Seconds until the end of a rank is told, and those that a hang takes longer than the time-out: as
# promised, and as much again on a busy machine.
TOLD, HANG = 2.0 * 2, 5.0 * 2
TIMEOUT = 2.0
# Seconds in which a rank starts, on a busy machine.
START = 20.0

# The ranks meet; then one of them does something, and the others wait for it for ever.
SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
from weft.runtime.world.distributed import current_world

folder, bad, when, how = sys.argv[1:]
here = os.environ["RANK"] == bad
Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))

def act():
    if here:
        Path(folder, "began").write_text(repr(time.time()))
        exec(how)

if when == "early":
    act()
world = current_world("cpu")
world.gather({world.rank: ""})
act()
world.gather({world.rank: ""})
threading.Event().wait()
"""

ENDS = {
    "os.kill(os.getpid(), signal.SIGKILL)": r"was ended by signal 9 \(SIGKILL\), perhaps for want",
    "os.kill(os.getpid(), signal.SIGSEGV)": r"was ended by signal 11 \(SIGSEGV\)",
    "os.kill(os.getpid(), signal.SIGABRT)": r"was ended by signal 6 \(SIGABRT\)",
    "os.kill(os.getpid(), signal.SIGTERM)": r"was ended by signal 15 \(SIGTERM\)",
    "sys.exit(7)": "ended with exit code 7",
    "os._exit(3)": "ended with exit code 3",
    "sys.exit(0)": "ended with exit code 0 while others still waited for it",
    "os._exit(0)": "ended with exit code 0 while others still waited for it",
    "raise MemoryError('full')": "failed: MemoryError: full",
    "raise ValueError('boom')": "failed: ValueError: boom",
    "import asyncio; raise asyncio.CancelledError('late')": r"failed: \S*CancelledError: late",
}
HANGS = {
    "os.kill(os.getpid(), signal.SIGSTOP)": r"was stopped by a signal \(SIGSTOP\)",
    "threading.Event().wait()": r"did not wait for them; it was at \S*script\.py:\d+, in act",
}
CAUSES = {**ENDS, **HANGS}


def cases() -> Iterator[Any]:
    """Each cause once, ranks and moments taking turns; in a thorough run on each rank at each moment."""
    for number, how in enumerate(CAUSES):
        turn = number % 2, ("late", "early")[number // 2 % 2]
        for case in product((0, 1), ("late", "early")):
            marks = () if case == turn else (pytest.mark.thorough,)
            yield pytest.param(how, *case, marks=marks)


def told(tmp_path: Path, how: str, bad: int, when: str) -> tuple[str, float]:
    """The line that `weft run` writes, and the seconds from what a rank did to its end."""
    script, temporary = tmp_path / "script.py", tmp_path / "temporary"
    script.write_text(SCRIPT)
    temporary.mkdir()
    command = [sys.executable, "-m", "weft", "run", "-n", "2", "--timeout", str(TIMEOUT)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(
        [*command, str(script), str(tmp_path), str(bad), when, how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    seconds = time.time() - float((tmp_path / "began").read_text())
    assert done.returncode == 1, done.stderr
    assert not list(temporary.iterdir())
    for rank in "01":
        assert not Path("/proc", (tmp_path / rank).read_text(), "exe").exists()
    lines = [line for line in done.stderr.splitlines() if line.startswith("weft run: ")]
    return lines[0], seconds


@pytest.mark.parametrize(("how", "bad", "when"), list(cases()))
def test_the_first_cause_is_named_soon(tmp_path: Path, how: str, bad: int, when: str) -> None:
    line, seconds = told(tmp_path, how, bad, when)
    assert re.match(rf"weft run: rank {bad} .*{CAUSES[how]}", line), line
    # Early, the other rank may still start.
    starts = START if when == "early" else 0.0
    assert seconds < starts + (TIMEOUT + HANG if how in HANGS else TOLD)
