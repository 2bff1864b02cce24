"""The form of tests on real processes, which `--processes` asks for, and what it tells that one process cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes import drawn

FILE = Path(__file__).parent / "program" / "told_by_processes.py"
FAIL = {
    "one_rank_has_other_data": r"AssertionError",
    "one_rank_fails": r"this is rank 1\n(.*\n)*-+ process 1\.1 -+",
    "one_rank_dies": r"rank 1 of 2 ended with 3",
    "one_rank_hangs": r"Timeout[^\n]*\n(.*\n)*.*test_one_rank_hangs",
}
PASS = {
    "ranks_train_alike",
    "worlds_of_several_sizes",
    "live_writes_that_run_whole",
    "rank_0_goes_on_alone",
}


def run(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", str(FILE), "-v", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.slow
def test_what_one_process_cannot_tell() -> None:
    told = run("--processes", "all")
    outcomes = dict(re.findall(r"::test_(\S+) (PASSED|FAILED)", told))
    on_processes = {name for name in outcomes if name.endswith("[processes]")}
    assert {name for name, outcome in outcomes.items() if outcome == "FAILED"} == {
        f"{name}[processes]" for name in FAIL
    }
    assert on_processes == {f"{name}[processes]" for name in (*FAIL, *PASS)}
    assert f"on processes: {len(on_processes)} tests; 0 entered no world" in told
    for name, words in FAIL.items():
        (text,) = re.findall(rf"_ test_{name}\[processes\] _+\n((?:(?!\n____).)*)", told, re.DOTALL)
        assert re.search(words, text), text


def test_a_tenth_is_drawn() -> None:
    names = [f"tests/program/test_step.py::test_{number}" for number in range(1000)]
    one, again, other = ({name for name in names if drawn(seed, name)} for seed in "aab")
    assert one == again != other
    assert 70 < len(one) < 130
    assert 70 < len(other) < 130
