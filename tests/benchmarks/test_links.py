"""Slow links: limited, gone afterwards, and refused with a reason where they cannot be made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import links


def names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.fixture
def can_make_links() -> None:
    """Skips where links cannot be made."""
    try:
        with links.slow_links(1, "1gbit"):
            pass
    except links.LinksError as error:
        pytest.skip(str(error))


def test_a_link_is_limited_and_removed(can_make_links: None) -> None:
    seen: list[Any] = []

    def use() -> None:
        with links.slow_links(2, "200mbit") as made:
            seen.extend(name for name in made.names if name in names())
            assert made.rate(sample=4 << 20) < 250e6
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert len(seen) == 2
    assert not any(name in names() for name in seen)


def test_what_a_killed_run_left_is_removed(can_make_links: None) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, own = (f"{links.PREFIX}{pid}-0" for pid in (gone.pid, os.getpid()))
    for name in (left, own):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        links.remove_stale()
        assert left not in names()
        assert own in names()
    finally:
        links.remove(own)


def test_what_is_killed_removes_its_links(can_make_links: None) -> None:
    code = (
        "import os, signal\n"
        "from benchmarks.links import slow_links\n"
        "with slow_links(2, '1gbit') as made:\n"
        "    print(*made.names, flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        left = killed.stdout.readline().split()
        assert all(name in names() for name in left)
        killed.kill()
    while any(name in names() for name in left):
        os.sched_yield()


def test_a_rank_enters_its_network(can_make_links: None) -> None:
    show = (
        "import socket\n"
        "from benchmarks.links import slow_links\n"
        "with slow_links(2, '1gbit') as made:\n"
        "    print(made.enter(1)['MASTER_ADDR'])\n"
        "    print([name for _, name in socket.if_nameindex()])\n"
    )
    shown = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    address, devices = shown.stdout.splitlines()
    assert address.endswith(".1")
    assert devices == "['lo', 'link0']"


def test_a_failing_rank_ends_the_others(can_make_links: None, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(1000)\n"
    )
    with links.slow_links(2, "1gbit") as made:
        assert links.run([sys.executable, str(program)], made) == 7


def test_without_root_says_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    with pytest.raises(links.LinksError, match="need root"), links.slow_links(2, "1gbit"):
        pass
