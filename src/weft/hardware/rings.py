"""Rings and chains inside a node: who sends to whom, and which share of the bytes.

If devices are linked directly, as in a cube mesh, several rings run at once, and no two share a link: they are
packed as Hamiltonian cycles into the graph of direct links. If switches link all devices, one ring in the order of
their numbers uses every link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

from weft.hardware.routes import NodeRoutes

# (from, to) -> share of the ring's bytes.
Flows: TypeAlias = dict[tuple[int, int], float]
# A search for rings ends after so many devices were tried; beyond so many members it is not begun.
_TRIES = 50_000
_MEMBERS = 16


@lru_cache(4096)
def ring_flows(routes: NodeRoutes, members: tuple[int, ...]) -> Flows:
    """Rings through all members: those of the direct links, or one in their order, whichever has the lighter load."""
    packed = packed_rings(routes, members)
    found = [_in_order(routes, members)]
    if packed:
        both = len(members) > 2
        found.append(_shared_out([way for ring in packed for way in _turns(ring, both)]))
    return min(found, key=lambda flows: heaviest(routes, flows))


@lru_cache(4096)
def chain_flows(routes: NodeRoutes, members: tuple[int, ...]) -> Flows:
    """Chains through all members, up and down: rings that are cut, or paths over direct links where no ring is."""
    cut = (len(members) - 1) / len(members)
    ring = ring_flows(routes, members)
    found = [_both_ways({pair: share * cut for pair, share in ring.items()})]
    if not packed_rings(routes, members):
        paths = _pack(routes, members, closed=False)
        if paths:
            found.append(_both_ways(_shared_out([tuple(pairwise(p)) for p in paths])))
    return min(found, key=lambda flows: heaviest(routes, flows))


@lru_cache(4096)
def packed_rings(routes: NodeRoutes, members: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Rings over direct links, as many as can be found without sharing a link."""
    return _pack(routes, members, closed=True)


def heaviest(routes: NodeRoutes, flows: Flows) -> float:
    """Seconds for each byte on the resource that is the busiest."""
    loads: Counter[int] = Counter()
    for (source, target), share in flows.items():
        way = routes.route(source, target)
        assert way is not None
        for resource in way.resources:
            loads[resource] += share / routes.capacities[resource][1]  # type: ignore[assignment]
    return max(loads.values(), default=0.0)


def _in_order(routes: NodeRoutes, members: Sequence[int]) -> Flows:
    nodes: dict[int, list[int]] = {}
    for member in members:
        nodes.setdefault(routes.kind.nodes[member], []).append(member)
    turns = max(map(len, nodes.values())) if len(nodes) > 1 else 1
    rings = []
    for turn in range(turns):
        turned = [held[turn % len(held) :] + held[: turn % len(held)] for held in nodes.values()]
        rings.append(tuple(_pairs([member for held in turned for member in held])))
    return _shared_out(rings)


def _pack(routes: NodeRoutes, members: Sequence[int], closed: bool) -> list[tuple[int, ...]]:
    widths = _direct(routes, members)
    if not widths or not 2 <= len(members) <= _MEMBERS:
        return []
    if len(members) == 2:
        return [tuple(members)] * int(sum(widths.values()) / 2)
    degrees = [sum(widths[a, b] for b in members) for a in members]
    most = min(degrees) // 2 if closed else sum(degrees) // (2 * (len(members) - 1))
    for count in range(int(most), 0, -1):
        found = _search(widths, members, count, closed)
        if found:
            return found
    return []


def _direct(routes: NodeRoutes, members: Sequence[int]) -> Counter[tuple[int, int]]:
    """The number of direct links between each pair of members, both ways round."""
    held = set(members)
    found: Counter[tuple[int, int]] = Counter()
    for link in routes.kind.links:
        if {link.source, link.target} <= held and not link.one_way and not link.shared:
            for pair in ((link.source, link.target), (link.target, link.source)):
                found[pair] += int(link.width)
    return +found


def _search(
    widths: Counter[tuple[int, int]], members: Sequence[int], count: int, closed: bool
) -> list[tuple[int, ...]]:
    """So many cycles, or paths, that use no link twice; [] where none are found within the tries."""
    tries = iter(range(_TRIES))

    def grown(
        free: Counter[tuple[int, int]], found: list[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        if len(found) == count:
            return found
        for path in _paths(free, members, closed, tries):
            used = Counter(pair for way in _turns(path, True, closed) for pair in way)
            done = grown(free - used, [*found, path])
            if done:
                return done
        return []

    return grown(widths, [])


def _paths(
    free: Counter[tuple[int, int]], members: Sequence[int], closed: bool, tries: Iterator[int]
) -> Iterator[tuple[int, ...]]:
    heap: list[tuple[int, ...]] = [(m,) for m in reversed(members[:1] if closed else members)]
    while heap and next(tries, None) is not None:
        path = heap.pop()
        if len(path) == len(members):
            if not closed or free[path[-1], path[0]] > 0:
                yield path
            continue
        # Wide links first: narrow ones are left for the devices that have no other.
        steps = [m for m in members if m not in path and free[path[-1], m] > 0]
        heap.extend((*path, m) for m in sorted(steps, key=lambda m: free[path[-1], m]))


def _turns(
    path: Sequence[int], both: bool, closed: bool = True
) -> list[tuple[tuple[int, int], ...]]:
    """The pairs of a ring or of a chain, one way round or both."""
    pairs = tuple(_pairs(path) if closed else pairwise(path))
    return [pairs, tuple((b, a) for a, b in pairs)] if both else [pairs]


def _pairs(ring: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(ring, [*ring[1:], ring[0]], strict=True)


def _shared_out(rings: Sequence[Sequence[tuple[int, int]]]) -> Flows:
    """Every ring carries as much as the others."""
    found: Flows = {}
    for ring in rings:
        for pair in ring:
            found[pair] = found.get(pair, 0.0) + 1 / len(rings)
    return found


def _both_ways(flows: Flows) -> Flows:
    found = dict(flows)
    for (source, target), share in flows.items():
        found[target, source] = found.get((target, source), 0.0) + share
    return found
