"""The program that measures idle time runs, and its figures are parts of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.thorough
def test_bubbles_are_parts_of_a_step(tmp_path: Path) -> None:
    program = str(ROOT / "benchmarks" / "bubbles.py")
    options = ["--tiny", "--steps", "2", "--schedules", "1f1b", "zero_bubble"]
    subprocess.run(
        [sys.executable, "-m", "weft", "run", "-n", "2", program, *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=250,
    )
    found = json.loads((tmp_path / "runs/bench/bubbles.json").read_text())["bubbles"]
    assert [each["in_theory"] for each in found.values()] == pytest.approx([1 / 9, 1 / 25])
    for each in found.values():
        assert 0 <= each["simulated"] < 1
        assert 0 < each["measured"] < 1
