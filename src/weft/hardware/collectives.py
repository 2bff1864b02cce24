"""Seconds of the collectives of groups, and the links that they need: the cheapest algorithm counts."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, final

import numpy as np

from weft.cached import cached_property
from weft.errors import UserError
from weft.hardware.rings import Flows, chain_flows, ring_flows
from weft.hardware.routes import Floats, Ints, Network, NodeRoutes
from weft.hardware.topology import LinkKind, Topology
from weft.hardware.traffic import (
    BusyLinks,
    Groups,
    GroupSet,
    LinkLoads,
    Pattern,
    Traffic,
    longest,
    total,
)
from weft.ir.plan_nodes import CollectiveKind
from weft.units import Bytes, Seconds


@final
class CollectiveRun(NamedTuple):
    """An algorithm's way of running a collective.

    Attributes:
        seconds: that it takes.
        parts: what runs, one after the other: a pattern of messages, the bytes of a rank, and how many rounds.
    """

    seconds: Seconds
    parts: tuple[tuple[Traffic, float, float], ...]


@final
class GroupCosts:
    """The collectives of groups that run at the same time.

    By ring, by tree, in a switch, or hierarchical, which works within nodes and then across them.

    An all-gather takes what a reduce-scatter takes: the same messages, the other way round. The time of adding up
    is in the protocols' shares.
    """

    def __init__(self, groups: GroupSet) -> None:
        self._groups = groups

    def all_reduce(self, size: float) -> CollectiveRun:
        """`size`: bytes of each rank's tensor."""
        found = [_run(self._ring, size, 2.0, own=1.0), _run(self._tree, size, own=1.0)]
        if self._adding is not None:
            found.append(_run(self._adding, size))
        if self._inner and self._outer:
            within = self._inner.reduce_scatter(size)
            found.append(_after(within, within, self._outer.all_reduce(size / self._per_node)))
        return min(found, key=_seconds)

    def reduce_scatter(self, size: float) -> CollectiveRun:
        """`size`: bytes of each rank's input. An all-reduce of which a rank keeps its part is an algorithm too."""
        found = [_run(self._ring, size), _run(self._tree, size)]
        if self._scattering is not None:
            found.append(_run(self._scattering, size))
        if self._inner and self._outer:
            across = self._outer.reduce_scatter(size / self._per_node)
            found.append(_after(self._inner.reduce_scatter(size), across))
        return min(found, key=_seconds)

    def all_to_all(self, size: float) -> CollectiveRun:
        """`size`: bytes of each rank's input."""
        found = [_run(self._direct, size)]
        if self._inner and self._outer:
            found.append(_after(self._inner.all_to_all(size), self._outer.all_to_all(size)))
        return min(found, key=_seconds)

    @cached_property
    def _ring(self) -> Traffic:
        return ring(self._groups)

    @cached_property
    def _tree(self) -> Traffic:
        return tree(self._groups)

    @cached_property
    def _adding(self) -> Traffic | None:
        return in_switch(self._groups, whole=True)

    @cached_property
    def _scattering(self) -> Traffic | None:
        return in_switch(self._groups, whole=False)

    @cached_property
    def _direct(self) -> Traffic:
        return direct(self._groups)

    @cached_property
    def _per_node(self) -> int:
        return self._groups.per_node or 1

    @cached_property
    def _inner(self) -> GroupCosts | None:
        if self._per_node == 1:
            return None
        return GroupCosts(GroupSet(self._groups.network, self._groups.within_nodes()))

    @cached_property
    def _outer(self) -> GroupCosts | None:
        if self._per_node == 1:
            return None
        return GroupCosts(GroupSet(self._groups.network, self._groups.across_nodes()))


def _run(traffic: Traffic, size: float, rounds: float = 1.0, own: float = 0.5) -> CollectiveRun:
    return CollectiveRun(traffic.seconds(size, rounds, own), ((traffic, size, rounds),))


def _after(*runs: CollectiveRun) -> CollectiveRun:
    parts = tuple(part for run in runs for part in run.parts)
    return CollectiveRun(Seconds(sum(run.seconds for run in runs)), parts)


def _seconds(run: CollectiveRun) -> Seconds:
    return run.seconds


COLLECTIVES: dict[str, Callable[[GroupCosts, float], CollectiveRun]] = {
    "all_reduce": GroupCosts.all_reduce,
    "reduce_scatter": GroupCosts.reduce_scatter,
    "all_gather": GroupCosts.reduce_scatter,
    "all_to_all": GroupCosts.all_to_all,
}


# The patterns of collectives: ring, tree, in a switch, and direct, as traffic of groups.
#
# Every member of a node takes its turn at the border, as the rings and trees of a library do, one for each card: what
# leaves a node is spread evenly over its members' ports.


def ring(groups: GroupSet) -> Traffic:
    """One round: each member forwards all parts but one, so that every part reaches every member.

    A reduce-scatter or an all-gather is one round, an all-reduce two (Patarasuk and Yuan 2009, section 3).
    """
    pattern = Pattern(groups)
    spread = groups.spread[groups.group]
    # A ring that leaves the node is cut once there.
    cut = np.where(groups.parts[groups.group] > 1, (groups.many - 1) / groups.many, 1.0)
    waits = pattern.inside(ring_flows, spread * cut)
    parts = np.flatnonzero(groups.level)
    pattern.border(parts, spread[parts])
    waits[:, parts] += pattern.crossing(parts, groups.after[parts], spread[parts]) * spread[parts]
    return pattern.traffic(waits, total)


def tree(groups: GroupSet) -> Traffic:
    """An all-reduce up and down a chain in each node and two binary trees over the nodes.

    Each tree has half of the bytes; a node that is inside one is a leaf of the other (Sanders, Speck and Träff 2009).
    """
    pattern = Pattern(groups)
    waits = pattern.inside(chain_flows, np.ones(len(groups.group)))
    deepest = np.zeros_like(waits)
    parts = np.flatnonzero(groups.level)
    # Inside one tree a node sends its half up and to two children, as a leaf of the other up; all count as the busiest.
    pattern.border(parts, np.minimum(groups.parts[groups.group[parts]] / 2, 2.0))
    depth = 2 * np.ceil(np.log2(np.maximum(groups.parts[groups.group], 1)))
    for children, parents in _trees(groups):
        half = np.full(len(children), 0.5)
        up = pattern.crossing(children, parents, half)
        pattern.crossing(parents, children, half)
        deepest[:, children] = np.maximum(deepest[:, children], up * depth[children])
    return pattern.traffic(waits, longest, deepest)


def in_switch(groups: GroupSet, whole: bool) -> Traffic | None:
    """Sums that a switch makes: it reads each member's tensor once, and forwards the sums.

    In a reduce-scatter a member gets its part; for an all-reduce (`whole`) it sends this part once more, to all
    (NVIDIA Scalable Hierarchical Aggregation and Reduction Protocol, on NVLink). None if some group is in
    several nodes, or not on one switch with this feature.
    """
    network = groups.network
    found = {
        _adding(network.routes[kind], members)
        for kind, members, _ in groups.alike()
        if len(members) > 1
    }
    link = found.pop() if len(found) == 1 and not (groups.parts > 1).any() else None
    if link is None or link.in_switch is None:
        return None
    pattern = Pattern(groups)
    sizes = groups.sizes[groups.group]
    sent = 1.0 + 1.0 / sizes if whole else np.ones(len(sizes))
    shares = [link.protocol(name).share for name in network.protocols]
    # It runs in the protocol that reaches most of the links, with a share of its own.
    place = shares.index(max(shares))
    pattern.inside(_all_pairs, sent / (sizes - 1) * shares[place] / link.in_switch.share)
    return pattern.only(place, link.in_switch.base + link.in_switch.hop)


def _adding(routes: NodeRoutes, members: tuple[int, ...]) -> LinkKind | None:
    kind = routes.kind
    on: dict[int, dict[int, LinkKind]] = {}
    for link in kind.links:
        if link.link.in_switch is not None and link.target >= len(kind) and not link.one_way:
            on.setdefault(link.target, {})[link.source] = link.link
    for joined in on.values():
        if set(members) <= set(joined):
            return joined[members[0]]
    return None


def direct(groups: GroupSet) -> Traffic:
    """Each member sends one of its parts to every other member at once: an all-to-all."""
    pattern = Pattern(groups)
    share = 1.0 / groups.sizes[groups.group]
    pattern.inside(_all_pairs, share)
    hops = np.where(groups.many > 1, pattern.longest_hop, 0.0)
    peers = groups.sizes[groups.group] - 1
    waits = np.maximum(hops, pattern.outside(share)) * np.ceil(peers / pattern.in_flight)
    return pattern.traffic(waits, longest)


def _all_pairs(_: NodeRoutes, members: tuple[int, ...]) -> Flows:
    return {(a, b): 1.0 for a in members for b in members if a != b}


def _trees(groups: GroupSet) -> Iterator[tuple[Ints, Ints]]:
    """Two binary trees over each group's parts: the parts that have a parent, and these parents."""
    count = groups.parts[groups.group]
    first = (np.cumsum(groups.parts) - groups.parts)[groups.group]
    place = np.arange(len(count)) - first
    children = np.flatnonzero(place)
    number, size, begin = place[children], count[children], first[children]
    bit = number & -number
    up = (number ^ bit) | (bit << 1)
    up = np.where(up < size, up, number ^ bit)
    yield begin + number, begin + up
    # The second tree is the first one's mirror image, or shifted by one where that would leave one in the middle.
    for_even = size - 1
    yield (
        begin + np.where(size % 2, (number + 1) % size, for_even - number),
        begin + np.where(size % 2, (up + 1) % size, for_even - up),
    )


# Sets of groups whose loads are kept; a step has some dozen.
_KEPT = 1024


def collective_seconds(
    topology: Topology, kind: CollectiveKind, size: Bytes, groups: Sequence[Sequence[int]]
) -> Seconds:
    """Seconds until the slowest of several groups has run a collective, where all run the same one at the same time.

    The cheapest of ring, tree and hierarchical algorithms counts, in the fastest protocol; all-to-alls go directly, or
    within nodes and then across them. A link's rate is shared by all groups that cross it.

    Args:
        topology: on whose devices it runs.
        kind: of collective.
        size: bytes of the largest side on one rank: of an all_reduce or reduce_scatter the input, of an all_gather the
            output, of an all_to_all the input.
        groups: numbers of devices; neither their order nor that within a group matters.

    Raises:
        UserError: when a group names a device twice, or one that the topology does not have.
    """
    run = _collective_run(topology, kind, size, groups)
    return Seconds(0.0) if run is None else run.seconds


def transfer_seconds(topology: Topology, pieces: Pieces) -> Seconds:
    """Seconds until pieces (from, to, bytes) that are sent at the same time have all arrived.

    Raises:
        UserError: when a piece names a device that the topology does not have.
    """
    traffic = _traffic_of_pieces(topology, pieces)
    return Seconds(0.0) if traffic is None else traffic.seconds(1.0)


def _collective_run(
    topology: Topology, kind: CollectiveKind, size: Bytes, groups: Sequence[Sequence[int]]
) -> CollectiveRun | None:
    if size <= 0:
        return None
    costs = _costs(topology).of(tuple(tuple(group) for group in groups if len(group) > 1))
    return None if costs is None else COLLECTIVES[kind](costs, size)


def _traffic_of_pieces(topology: Topology, pieces: Pieces) -> Traffic | None:
    for source, target, _ in pieces:
        _check_devices(topology, (source, target))
    return traffic_of_pieces(_costs(topology).network, pieces)


def _joined(parts: Sequence[BusyLinks]) -> BusyLinks:
    if len(parts) == 1:
        return parts[0]
    resources = np.concatenate([np.zeros(0, dtype=np.int64), *(one.resources for one in parts)])
    met, place = np.unique(resources, return_inverse=True)
    seconds = np.concatenate([np.zeros(0), *(one.seconds for one in parts)])
    total = np.bincount(place.reshape(-1), weights=seconds, minlength=len(met))
    return BusyLinks(met, total.astype(np.float64))


@final
class _Costs:
    """A topology's network, and the groups that were asked for last."""

    def __init__(self, topology: Topology) -> None:
        self.network = Network(topology)
        self._topology = topology
        self._known: OrderedDict[Groups, GroupCosts] = OrderedDict()

    def of(self, groups: Groups) -> GroupCosts | None:
        if not groups:
            return None
        found = self._known.get(groups)
        if found is None:
            for group in groups:
                _check_devices(self._topology, group)
                twice = [device for device in group if group.count(device) > 1]
                if twice:
                    raise UserError(
                        f"a group of {len(group)} devices must name each once, got {twice[0]} twice"
                    )
            found = self._known[groups] = GroupCosts(GroupSet(self.network, groups))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found


def _costs(topology: Topology) -> _Costs:
    # Beside the topology's fields, as its cached properties are: gone when it is.
    found: _Costs | None = vars(topology).get("_costs")
    if found is None:
        found = vars(topology)["_costs"] = _Costs(topology)
    return found


def _check_devices(topology: Topology, devices: Sequence[int]) -> None:
    for device in devices:
        if not 0 <= device < len(topology):
            raise UserError(
                f"device {device} is not one of the topology {topology.name}, "
                f"which has devices 0 to {len(topology) - 1}"
            )


Pieces: TypeAlias = Sequence[tuple[int, int, Bytes]]


def traffic_of_pieces(network: Network, pieces: Pieces) -> Traffic | None:
    """The traffic of pieces, until the last has arrived; None if all stays on its device."""
    sent = [piece for piece in pieces if piece[0] != piece[1] and piece[2] > 0]
    if not sent:
        return None
    source, target = (np.array([piece[side] for piece in sent]) for side in (0, 1))
    size = np.array([piece[2] for piece in sent], dtype=float)
    far = network.unit[source] != network.unit[target]
    loads = LinkLoads(network)
    near = [piece for piece, is_far in zip(sent, far.tolist(), strict=True) if not is_far]
    waits, links = _inside(network, loads, near)
    if far.any():
        units = network.unit[source[far]], network.unit[target[far]]
        for ways, ends in ((network.out, source[far]), (network.into, target[far])):
            resources, place = ways.of(ends)
            loads.add(resources, size[far][place])
        for resources, over in network.uplinks(*units):
            loads.add(resources, size[far][over])
        met = np.concatenate(units)
        level = network.level_waits[network.meeting(*units)].max()
        waits = np.maximum(waits, network.port_waits[:, met].max(axis=1) + level)
        for group in np.unique(network.group[met]).tolist():
            links |= {port.link for port in network.routes[group].kind.ports}
    # Messages to more peers than are in flight at a time wait for one another.
    most = max(Counter(piece[0] for piece in sent).values())
    rounds = -(-most // min(link.in_flight for link in links))
    bases = tuple(
        max(link.protocol(name).base for link in links) + rounds * wait
        for name, wait in zip(network.protocols, waits.tolist(), strict=True)
    )
    return Traffic(bases, (0.0,) * len(bases), loads.per_byte(), 0.0, loads)


def _inside(network: Network, loads: LinkLoads, pieces: Pieces) -> tuple[Floats, set[LinkKind]]:
    waits = np.zeros(len(network.protocols))
    links: set[LinkKind] = set()
    for source, target, size in pieces:
        unit = network.unit[source]
        routes = network.routes[network.group[unit]]
        way = routes.route(int(network.local[source]), int(network.local[target]))
        assert way is not None
        loads.add(network.base[unit] + np.array(way.resources), np.array(float(size)))
        waits = np.maximum(waits, network.waits(way))
        links.update(way.links)
    return waits, links


@final
@dataclass(frozen=True)
class CollectiveLinks:
    """The links of a collective of all groups at the same time; arguments as of `collective_seconds`."""

    topology: Topology = field(repr=False, hash=False)
    kind: CollectiveKind
    size: Bytes
    groups: Groups

    def busy(self) -> BusyLinks:
        """Numbers of resources, and seconds in which the collective needs each of them whole."""
        run = _collective_run(self.topology, self.kind, self.size, self.groups)
        parts = () if run is None else run.parts
        return _joined([traffic.busy(some, rounds) for traffic, some, rounds in parts])


@final
@dataclass(frozen=True)
class TransferLinks:
    """The links of pieces (from, to, bytes) that are sent at the same time."""

    topology: Topology = field(repr=False, hash=False)
    pieces: tuple[tuple[int, int, Bytes], ...]

    def busy(self) -> BusyLinks:
        """Numbers of resources, and seconds in which the pieces need each of them whole."""
        traffic = _traffic_of_pieces(self.topology, self.pieces)
        return _joined([] if traffic is None else [traffic.busy(1.0)])
