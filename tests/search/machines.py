"""Machines that are searched for and stand in no catalogue: one of slow links, and one of two kinds of devices."""

from __future__ import annotations

from weft.hardware.topology_files import parse_topology

_SWITCH = [{"name": "switch", "latency_microseconds": 1}]

SLOW = parse_topology(
    {
        "weft_topology": 1,
        "name": "slow",
        "links": {"slow": {"gb_per_second": 0.125, "latency_microseconds": 50}},
        "nodes": [
            {
                "count": 4,
                "devices": {"kind": "k80", "count": 1},
                "ports": [{"link": "slow", "count": 1}],
            }
        ],
        "network": _SWITCH,
    },
    "slow",
)
TWO_KINDS = parse_topology(
    {
        "weft_topology": 1,
        "name": "two kinds",
        "nodes": [
            {
                "count": 2,
                "devices": {"kind": "a100-sxm-40gb", "count": 1},
                "ports": [{"link": "infiniband-hdr", "count": 1}],
            },
            {
                "count": 2,
                "devices": {"kind": "v100-sxm2-16gb", "count": 1},
                "ports": [{"link": "infiniband-edr", "count": 1}],
            },
        ],
        "network": _SWITCH,
    },
    "two kinds",
)
