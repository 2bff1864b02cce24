"""FlexFlow's six workloads on its two clusters, as its figure 7: what a search finds beside data parallel and experts.

The paper's figure has no numbers in print. The targets below are set by hand: 1.3 times the best of the others, and
as fast as data parallelism for ResNet-101, for the most devices of a cluster.
"""

from __future__ import annotations

from functools import partial

import weft
from benchmarks.search.hands import Beside
from benchmarks.search.trial import Trial
from benchmarks.search.workloads.table import WORKLOADS
from weft.planning.machine import machine_of

CLUSTERS = {"flexflow-p100": (4, 8, 16), "flexflow-k80": (4, 8, 16, 32, 64)}
# The paper's least gain on the most devices, and that of plans which are data parallel.
GAIN, ALIKE = 1.3, {"ResNet-101": 1.0}


def trials() -> list[Trial]:
    """A trial for each workload, cluster and number of devices."""
    return [
        Trial(f"flexflow/{name}/{cluster}x{devices}", _beside(name, cluster, devices).tried)
        for name in WORKLOADS
        for cluster, numbers in CLUSTERS.items()
        for devices in numbers
    ]


def _beside(name: str, cluster: str, devices: int) -> Beside:
    """For fewer devices than a cluster has, no gain is in print: no loss."""
    workload, topology = WORKLOADS[name], f"{cluster}x{devices}"
    most = devices == max(CLUSTERS[cluster])
    gain = ALIKE.get(name, GAIN) if most else 1.0

    def plans() -> list[tuple[str, weft.Strategy]]:
        experts = workload.experts(devices, machine_of(topology).device_type)
        return [("data parallel", weft.data_parallel()), *experts.items()]

    return Beside(
        what=f"{name}, {topology}",
        job=partial(workload.job, devices),
        topology=topology,
        plans=plans,
        least=gain,
        target=f">= {gain:.1f}x the best of data parallel and experts",
    )
