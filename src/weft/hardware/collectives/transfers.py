"""Seconds of pieces that pass between devices at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, final

import numpy as np

from weft.hardware.collectives.traffic import LinkLoads
from weft.hardware.routes import Network
from weft.hardware.topology.link_kind import LinkKind
from weft.units import Bytes, Seconds

Pieces: TypeAlias = Sequence[tuple[int, int, Bytes]]


@final
class PiecesCost(NamedTuple):
    """Seconds of pieces, their loads on the links in bytes, and the number of the protocol that is the quickest."""

    seconds: Seconds
    loads: LinkLoads
    protocol: int


def cost_of_pieces(network: Network, pieces: Pieces) -> PiecesCost | None:
    """The cost until the last piece has arrived; None where all stays on its device."""
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
        level = network.meeting(*units)
        for ways, ends in ((network.out, source[far]), (network.into, target[far])):
            resources, place = ways.of(ends)
            loads.add(resources, size[far][place])
        for above in range(1, int(level.max())):
            over = level > above
            for down, side in enumerate(units):
                loads.add(network.uplink(above, side[over], bool(down)), size[far][over])
        across = network.port_waits[:, np.concatenate(units)].max(axis=1)
        waits = np.maximum(waits, across + network.level_waits[level].max())
        links |= _port_links(network, np.concatenate(units))
    return _quickest(network, loads, waits, links, sent)


def _inside(
    network: Network, loads: LinkLoads, pieces: Pieces
) -> tuple[np.typing.NDArray[np.float64], set[LinkKind]]:
    """Load the links within nodes; seconds of the longest way in each protocol, and the kinds of links."""
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


def _port_links(network: Network, units: np.typing.NDArray[np.int64]) -> set[LinkKind]:
    groups = np.unique(network.group[units]).tolist()
    return {port.link for group in groups for port in network.routes[group].kind.ports}


def _quickest(
    network: Network,
    loads: LinkLoads,
    waits: np.typing.NDArray[np.float64],
    links: set[LinkKind],
    sent: Pieces,
) -> PiecesCost:
    in_flight = min(link.in_flight for link in links)
    most = max(Counter(piece[0] for piece in sent).values())
    rounds = -(-most // in_flight)
    found = [
        max(link.protocol(name).base for link in links) + rounds * wait + moved
        for name, wait, moved in zip(
            network.protocols, waits.tolist(), loads.per_byte(), strict=True
        )
    ]
    return PiecesCost(Seconds(min(found)), loads, found.index(min(found)))
