"""What single topics wrote becomes rows of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import topics
from benchmarks.__main__ import TOPICS

MACHINE: dict[str, Any] = {"processor": "x", "cores": 2}


def case(seconds: float, ratio: float) -> dict[str, float]:
    """What `benchmarks.measure.compare` makes of a median of ratios, and a tenth to both sides."""
    ends = {"lowest_ratio": ratio * 0.9, "highest_ratio": ratio * 1.1}
    return {"plain_seconds": seconds, "speed_relative_to_peer": ratio, **ends}


FOUND: dict[str, Any] = {
    "overhead": {
        "gpt": {**case(0.1, 1 / 1.05), "overhead": 0.05},
        "mlp": {**case(0.0002, 0.8), "overhead": 0.25},
        "act on one queue": {"microseconds": 5.5},
        "act after one on another queue": {"microseconds": 35.0},
        "bound": "overhead <= 0.05, 5 us an act",
    },
    "eager_overhead": {
        name: {**case(1.0, ratio), "weft_us_per_op": 11.0, "dtensor_us_per_op": 22.5}
        | {"plain_us_per_op": 2.0}
        for name, ratio in (("no_grad", 2.0), ("forward", 0.8), ("forward_backward", 1.0))
    },
    "memory_flat": {
        "steps": 2000,
        "zero 3": {"live_tensor_growth": 0, "resident_growth_bytes": 12 * 2**10},
        "pipeline": {"live_tensor_growth": 1, "resident_growth_bytes": -(2**10)},
        "data": {"live_tensor_growth": -1, "resident_growth_bytes": 4 * 2**20},
    },
    "compile_time": {
        "zero3": {
            "planning_seconds": {"6": 1.0, "24": 4.0, "96": 17.6},
            "growth_over_linear": {"6 to 24": 1.0, "24 to 96": 1.1},
        },
        "kernels": {"seconds": {"24": 20.0, "96": 25.0}, "last_growth": 1.25},
    },
}


def test_every_topic_of_a_run_has_rows() -> None:
    names = {command[1] for command in TOPICS}
    assert names == {f"benchmarks.{name}" for name in topics.LINES}


def test_rows_say_what_was_found_and_what_missed() -> None:
    lines = topics.lines({name: {**found, "machine": MACHINE} for name, found in FOUND.items()})
    assert all(len(line) == len(topics.COLUMNS) for line in lines)
    assert {line[0] for line in lines} == {f"`python -m benchmarks.{name}`" for name in FOUND}
    assert [line[3:] for line in lines] == [
        ["5.0% (rounds: -5% to 17%)", ""],
        ["25.0% (rounds: 14% to 39%)", "missed"],
        ["5.5 µs", "missed"],
        ["35.0 µs", ""],
        ["0.50× (11 to 22.5 µs an op; plain 2)", ""],
        ["1.25× (11 to 22.5 µs an op; plain 2)", "missed"],
        ["1.00× (11 to 22.5 µs an op; plain 2)", ""],
        ["+0 tensors, resident memory +12 KiB", ""],
        ["+1 tensors, resident memory -1 KiB", "missed"],
        ["-1 tensors, resident memory +4,096 KiB", "missed"],
        ["6: 1.0 s, 24: 4.0 s, 96: 17.6 s; 1.10", "missed"],
        ["24: 20.0 s, 96: 25.0 s; 1.25", ""],
    ]


def test_topics_that_failed_or_did_not_run_are_left_out(tmp_path: Path) -> None:
    for name in ("overhead", "memory_flat"):
        (tmp_path / f"{name}.json").write_text(json.dumps(FOUND[name]))
    told = topics.read(tmp_path, {"benchmarks.overhead": "exit code 1"})
    assert told == {"memory_flat": FOUND["memory_flat"]}
