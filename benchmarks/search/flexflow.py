"""FlexFlow's six workloads on its two clusters, as its figure 7: what a search finds beside data parallel and experts.

The paper's figure has no numbers in print. The targets below are set by hand: 1.3 times the best of the others, and
as fast as data parallelism for ResNet-101, for the most devices of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter

import weft
from benchmarks.models import stored
from benchmarks.search.hands import Hand, simulated
from benchmarks.search.trial import Finding, Trial, searched, seconds_text
from benchmarks.search.workloads.table import WORKLOADS
from weft.planning.machine import machine_of

CLUSTERS = {"flexflow-p100": (4, 8, 16), "flexflow-k80": (4, 8, 16, 32, 64)}
# The paper's least gain on the most devices, and that of plans which are data parallel.
GAIN, ALIKE = 1.3, {"ResNet-101": 1.0}


def trials() -> list[Trial]:
    """A trial for each workload, cluster and number of devices."""
    return [
        Trial(f"flexflow/{name}/{cluster}x{devices}", partial(_tried, name, cluster, devices))
        for name in WORKLOADS
        for cluster, numbers in CLUSTERS.items()
        for devices in numbers
    ]


def _tried(name: str, cluster: str, devices: int, seconds: float) -> Sequence[Finding]:
    workload, topology = WORKLOADS[name], f"{cluster}x{devices}"
    begin = perf_counter()
    step = stored(workload.job(devices))
    captured = perf_counter() - begin
    plans = {"data parallel": weft.data_parallel()}
    plans |= workload.experts(devices, machine_of(topology).device_type)
    begin = perf_counter()
    tried = [simulated(step, topology, each, strategy) for each, strategy in plans.items()]
    simulating = perf_counter() - begin
    hands = sorted(
        (each for each in tried if isinstance(each, Hand)), key=lambda each: each.seconds
    )
    failed = [each for each in tried if isinstance(each, str)]
    made = searched(step, topology, seconds=seconds)
    if isinstance(made, str):
        return [Finding(f"{name}, {topology}", "", f"no strategy: {made}", False)]
    found = made.result
    gain = hands[0].seconds / found.seconds if hands else 0.0
    plain = next((each for each in hands if each.name == "data parallel"), None)
    target = _target(name, cluster, devices)
    beside = "; ".join(f"{each.name} {seconds_text(each.seconds)}" for each in hands)
    return [
        Finding(
            f"{name}, {topology}",
            f">= {target:.1f}x the best of data parallel and experts",
            f"{gain:.3f}x: {made} ({beside})",
            gain >= target,
            "; ".join([*failed, *_why(plain, found)]),
            {
                "gain": gain,
                "found": found.seconds,
                "bound": found.bound,
                "search_seconds": made.took,
                "capture_seconds": captured,
                "hand_seconds": simulating,
                "planned": len(found.tried),
                "nodes": len(step.graph.nodes),
                "unhidden": _unhidden(plain, found) if plain else None,
                "hands": {each.name: each.seconds for each in hands},
            },
        )
    ]


def _why(plain: Hand | None, found: weft.SearchResult) -> Iterator[str]:
    """What data parallel hides and does not, and how much is left to find."""
    if plain is not None:
        yield (
            f"data parallel hides {seconds_text(plain.hidden)} of exchanges, {seconds_text(plain.exposed)} not: "
            f"{_unhidden(plain, found):.2f}x one that hides nothing"
        )
    yield f"bound {found.gap:.0%} below"
    yield f"{len(found.tried)} planned"


def _unhidden(plain: Hand, found: weft.SearchResult) -> float:
    """The gain over data parallel as it would be with all its exchanges after one another."""
    return (plain.seconds + plain.hidden) / found.seconds


def _target(name: str, cluster: str, devices: int) -> float:
    """For fewer devices than a cluster has, no gain is in print: no loss."""
    return ALIKE.get(name, GAIN) if devices == max(CLUSTERS[cluster]) else 1.0
