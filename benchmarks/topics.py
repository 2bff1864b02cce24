"""Single topics as rows of one table: what the programs of `benchmarks.__main__.TOPICS` wrote of their last run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Topic: TypeAlias = Mapping[str, Any]
Line: TypeAlias = list[str]

COLUMNS = ("command", "what", "bound", "found", "")
# Of the time of plain code; microseconds of an empty act; bytes that 2,000 steps may leave in the process.
OVERHEAD, ACT, RESIDENT = 0.05, 5.0, 4 * 2**20
# Of the growth of the model; of that of kernels, whose number of distinct parts stays.
PLANNING, KERNELS = 1.0, 1.5


def read(folder: Path, failed: Mapping[str, str]) -> dict[str, Topic]:
    """What the topics wrote there, by name, but of those that failed."""
    paths = {name: folder / f"{name}.json" for name in LINES if f"benchmarks.{name}" not in failed}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def lines(topics: Mapping[str, Topic]) -> list[Line]:
    """The cells of all rows, in the order of `COLUMNS`."""
    return [
        [f"`python -m benchmarks.{name}`", *cells]
        for name, topic in topics.items()
        for cells in LINES[name](topic)
    ]


def cases(topic: Topic) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What was measured; the rest says how."""
    return ((name, case) for name, case in topic.items() if isinstance(case, Mapping))


def judged(what: str, bound: str, found: str, held: bool) -> Line:
    return [what, bound, found, "" if held else "missed"]


def overhead(topic: Topic) -> Iterator[Line]:
    """What actors add to the same calls as plain code, and what an act takes that does nothing."""
    for name, case in cases(topic):
        if "overhead" in case:
            low, high = (1 / case[end] - 1 for end in ("highest_ratio", "lowest_ratio"))
            found = f"{case['overhead']:.1%} (rounds: {low:.0%} to {high:.0%})"
            step = f"{case['plain_seconds'] * 1e3:.3g} ms a step"
            what = f"actors over the same calls as plain code, {name}, {step}"
            yield judged(what, f"≤ {OVERHEAD:.0%}", found, case["overhead"] <= OVERHEAD)
        elif "microseconds" in case:
            took = case["microseconds"]
            bounded = "another queue" not in name  # there two threads take turns
            bound = f"≤ {ACT:.0f} µs" if bounded else "–"
            yield judged(f"an empty {name}", bound, f"{took:.1f} µs", took <= ACT or not bounded)


def eager_overhead(topic: Topic) -> Iterator[Line]:
    """What an op on global tensors takes, beside DTensor's."""
    for name in ("no_grad", "forward", "forward_backward"):
        case = topic[name]
        times = [case[f"{side}_us_per_op"] for side in ("weft", "dtensor", "plain")]
        over = 1 / case["speed_relative_to_peer"]
        found = "{:.2f}× ({:.3g} to {:.3g} µs an op; plain {:.3g})".format(over, *times)
        what = f"a small op on eager global tensors over DTensor's, 1 process, {name}"
        yield judged(what, "≤ 1×", found, over <= 1)


def memory_flat(topic: Topic) -> Iterator[Line]:
    """What many steps leave behind."""
    for name, case in cases(topic):
        if "live_tensor_growth" in case:
            tensors, resident = case["live_tensor_growth"], case["resident_growth_bytes"]
            found = f"{tensors:+d} tensors, resident memory {resident / 2**10:+,.0f} KiB"
            what = f"growth over {topic['steps']:,} steps, {name}"
            bound = f"no tensors, resident memory {RESIDENT / 2**10:,.0f} KiB"
            yield judged(what, bound, found, tensors <= 0 and resident < RESIDENT)


def compile_time(topic: Topic) -> Iterator[Line]:
    """How planning and kernels grow with layers."""
    for name, case in cases(topic):
        if case.get("growth_over_linear"):
            (last, growth) = list(case["growth_over_linear"].items())[-1]
            found = f"{seconds(case['planning_seconds'])}; {growth:.2f}"
            what = (
                f"planning of a GPT, {name}, seconds by layers; growth over that of layers, {last}"
            )
            yield judged(what, f"≤ {PLANNING:.0f}", found, growth <= PLANNING)
        elif name == "kernels":
            growth = case["last_growth"]
            what = "its kernels by Inductor, nothing cached; growth from the last but one"
            bound, found = f"< {KERNELS}", f"{seconds(case['seconds'])}; {growth:.2f}"
            yield judged(what, bound, found, growth < KERNELS)


def seconds(by_layers: Mapping[str, float]) -> str:
    return ", ".join(f"{layers}: {took:.1f} s" for layers, took in by_layers.items())


LINES: dict[str, Callable[[Topic], Iterator[Line]]] = {
    "overhead": overhead,
    "eager_overhead": eager_overhead,
    "memory_flat": memory_flat,
    "compile_time": compile_time,
}
