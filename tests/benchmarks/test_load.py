"""What else a machine does while something is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.load import TICKS, Load, Watch


def told(proc: Path, busy: int, irq: int, steal: int, own: int, pid: int) -> None:
    """Files as the kernel writes them, in ticks; the last processor is not one of ours."""
    counts = f"{busy} 0 0 999 0 {irq} 0 {steal} 0 0"
    other = "5000 0 0 0 0 0 0 5000 0 0" if busy else "0 0 0 0 0 0 0 0 0 0"
    (proc / "stat").write_text(f"cpu  1 2 3\ncpu0 {counts}\ncpu9999 {other}\nintr 1 2\n")
    (proc / "loadavg").write_text("1.25 1 1 1/1 1\n")
    for each, ticks in ((pid, own), (os.getpid(), 0)):
        (proc / str(each)).mkdir(exist_ok=True)
        fields = ["S", *["0"] * 10, str(ticks), "0", "7"]
        (proc / str(each) / "stat").write_text(f"{each} (a) b) {' '.join(fields)}")


def test_what_is_not_measured_is_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    told(tmp_path, 0, 0, 0, 0, pid=77)
    watch = Watch([77, 78], proc=tmp_path)  # 78 has ended
    now[0] = 2.0
    told(tmp_path, 2 * TICKS, TICKS, TICKS // 10, 3 * TICKS // 2, pid=77)
    assert watch.load() == Load(foreign=0.25, steal=0.05, average=1.25)
    now[0] = 4.0
    assert watch.load() == Load(0.0, 0.0, 1.25)  # since the last call


def test_a_little_disturbs_nothing() -> None:
    assert not Load(0.05, 0.02, 9.0).disturbs
    assert Load(0.06, 0.0, 0.0).disturbs
    assert Load(0.0, 0.03, 0.0).disturbs
    row = {"foreign": 0.061, "steal": 0.0, "average": 1.0, "disturbed": True}
    assert Load(0.0612345, 0.0, 1.0).row() == row


def test_the_kernels_own_files_can_be_read() -> None:
    found = Watch([os.getppid()]).load()
    assert found.foreign >= 0
    assert found.steal >= 0
    assert found.average >= 0
