"""The examples run as their first lines say, with small settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"steps": 4, "batch": 4, "length": 16, "layers": 2, "width": 32, "heads": 2}
KEYS = {
    "ranks",
    "strategy",
    "losses",
    "single_device_losses",
    "max_relative_difference",
    "tokens_per_second",
    "single_device_tokens_per_second",
    "single_device_threads",
}


def run(ranks: int, script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "weft", "run", "-n", str(ranks), str(EXAMPLES / script)]
    result = subprocess.run(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_gpt_agrees_with_plain_pytorch(tmp_path: Path) -> None:
    sizes = [word for name, size in SMALL.items() for word in (f"--{name}", str(size))]
    output = run(2, "gpt.py", *sizes, "--out", str(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() == KEYS
    assert summary["ranks"] == 2
    assert summary["single_device_threads"] == len(os.sched_getaffinity(0))
    assert len(summary["losses"]) == len(summary["single_device_losses"]) == SMALL["steps"]
    assert summary["max_relative_difference"] < 1e-5
    assert summary["losses"][0] != summary["losses"][-1]
    assert summary["tokens_per_second"] > 0
    assert f"{summary['losses'][-1]:.6f}" in output


@pytest.mark.thorough
def test_digits_are_learned_by_a_hybrid() -> None:
    output = run(2, "digits.py", "--epochs", "3")
    right = [int(count) for count in re.findall(r"(\d+) of 360 digits right", output)]
    assert len(right) == 3, "one line for each epoch, from one rank"
    assert right[-1] > 300


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 120
