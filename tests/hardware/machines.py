"""Random machines for hypothesis, as the content of topology files, and groups of their devices."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from weft.hardware.topology import Topology
from weft.hardware.topology_files import parse_topology

KINDS = ("cpu", "v100-sxm2-16gb", "h100-sxm-80gb")
IN_SWITCH = {"in_switch": {"base_microseconds": 5, "share": 0.7}}
RATES = (0.5, 3, 12.5, 25, 100, 450)


@st.composite
def links(draw: Any, ideal: bool = False) -> dict[str, Any]:
    """A fast and a slow kind of link; ideal ones have no latency and reach their rate."""
    if ideal:
        return {name: {"gb_per_second": draw(st.sampled_from(RATES))} for name in ("fast", "slow")}
    return {name: draw(link()) for name in ("fast", "slow")}


@st.composite
def link(draw: Any) -> dict[str, Any]:
    few = st.sampled_from((0, 0.5, 3, 20))
    protocol = st.fixed_dictionaries(
        {
            "base_microseconds": few,
            "hop_microseconds": few,
            "share": st.sampled_from((0.2, 0.9, 1.0)),
        }
    )
    names = draw(st.sampled_from((("any",), ("quick", "wide"), ("quick", "wide", "any"))))
    return {
        "gb_per_second": draw(st.sampled_from(RATES)),
        "latency_microseconds": draw(few),
        "in_flight": draw(st.sampled_from((1, 4))),
        "protocols": {name: draw(protocol) for name in names},
        **draw(st.sampled_from(({}, {"own_gb_per_second": 300}, IN_SWITCH))),
    }


@st.composite
def nodes(draw: Any, kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
    """Some equal nodes: devices on one switch, on switches for pairs, or in a mesh of direct links."""
    size = draw(st.integers(1, 5))
    form = draw(st.sampled_from(("switch", "pairs", "mesh", "ring")))
    width = draw(st.sampled_from((1, 2)))
    names = [f"device{place}" for place in range(size)]
    content: dict[str, Any] = {
        "count": draw(st.integers(1, 3)),
        "devices": {"kind": draw(st.sampled_from(kinds)), "count": size},
        "ports": draw(st.sampled_from(ports(size))),
    }
    if form == "switch":
        content["switches"] = [{"name": "s", "link": "fast", "width": width, "joins": "devices"}]
    elif form == "pairs":
        pairs = [names[place : place + 2] for place in range(0, size, 2)]
        leaves = [
            {"name": f"p{place}", "link": "fast", "joins": pair} for place, pair in enumerate(pairs)
        ]
        joins = [leaf["name"] for leaf in leaves]
        content["switches"] = [*leaves, {"name": "top", "link": "slow", "joins": joins}]
    else:
        far = {(0, size - 1)} if form == "ring" else set()
        both = [(a, b) for a in range(size) for b in range(a + 1, size)]
        near = [(a, b) for a, b in both if form == "mesh" or b == a + 1 or (a, b) in far]
        content["switches"] = [{"name": "host", "link": "slow", "joins": "devices"}]
        content["links"] = [
            {"between": [names[a], names[b]], "link": "fast", "width": width} for a, b in near
        ]
    return content


def ports(size: int) -> list[list[dict[str, Any]]]:
    """One for the node, one for each device, one at the first device's side only with another elsewhere."""
    return [
        [{"link": "slow", "count": 1}],
        [{"link": "slow", "count": size}],
        [{"link": "slow", "width": 2, "count": (size + 1) // 2}],
    ]


@st.composite
def contents(draw: Any, ideal: bool = False, flat: bool = False) -> dict[str, Any]:
    """The content of a topology's file; `flat` has one level without oversubscription."""
    levels: list[dict[str, Any]] = [{"name": "top", "latency_microseconds": 0 if ideal else 1}]
    if not flat and draw(st.booleans()):
        levels[0:0] = [
            {
                "name": "leaf",
                "nodes": draw(st.integers(1, 3)),
                "oversubscription": draw(st.sampled_from((1, 2.5))),
            }
        ]
    found = draw(st.lists(nodes(), min_size=1, max_size=3))
    if len(found) == found[0]["count"] == 1:
        del found[0]["ports"]
    return {
        "weft_topology": 1,
        "name": "random",
        "links": draw(links(ideal)),
        "nodes": found,
        "network": levels,
    }


def machines(ideal: bool = False, flat: bool = False) -> st.SearchStrategy[Topology]:
    """Topologies with few devices."""
    return contents(ideal, flat).map(lambda content: parse_topology(content, "random"))


@st.composite
def families(draw: Any, machine: Topology) -> list[list[int]]:
    """Some groups of a machine's devices that share none."""
    order = draw(st.permutations(range(len(machine))))
    used = draw(st.integers(1, len(order)))
    parts = draw(st.integers(1, max(1, used // 2)))
    return [list(order[place:used:parts]) for place in range(parts)]
