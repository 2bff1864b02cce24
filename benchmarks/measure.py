"""Timing in interleaved rounds, so that what disturbs the machine disturbs all sides alike."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

OUT = Path("runs/bench")

Step = Callable[[], object]


def interleave(
    sides: Mapping[str, Step], rounds: int, steps: int, before: Step = lambda: None
) -> dict[str, list[float]]:
    """Time every side in every round, in turn; the first round warms up and does not count.

    Args:
        sides: what to time, by name.
        rounds: how many rounds count.
        steps: calls of a side in one round.
        before: runs untimed before a side's turn, such as a barrier.

    Returns:
        for each side, the mean seconds of a step in each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        order = list(sides) if number % 2 else list(sides)[::-1]
        for name in order:
            before()
            start = time.perf_counter()
            for _ in range(steps):
                sides[name]()
            if number:
                seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """Its name where the kernel tells it, else its architecture."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def save(name: str, result: Mapping[str, Any]) -> None:
    """Write `runs/bench/<name>.json` and print it."""
    OUT.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**result, "machine": machine()}, indent=1)
    (OUT / f"{name}.json").write_text(text)
    print(f"{name}: {text}", flush=True)
