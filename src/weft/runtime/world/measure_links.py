"""The speed of the links between hosts, measured by a few exchanges before anything is planned."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from weft.hardware import Device, linked
from weft.runtime.channels.channel import Channel
from weft.units import Bytes, Seconds

# Bytes of a large exchange: some milliseconds on a slow link.
_LARGE = 2**20
# The fastest of so many counts: whatever else happens only makes them slower.
_TIMES = {1: 8, _LARGE: 3}


def measured_links(device: Device, channel: Channel) -> Device:
    """A device behind the links of a channel, the same on all its ranks.

    Every rank sends to the next one and receives from the one before, all at once. The slowest
    counts.

    Args:
        device: the figures of the rank's device; those of its links are replaced.
        channel: of all ranks, which must call this together.
    """
    own = " ".join(str(_seconds(channel, size)) for size in _TIMES)
    every = [tuple(map(float, text.split())) for text in channel.exchange_text(own)]
    small, large = (max(each) for each in zip(*every, strict=True))
    return linked(device, _LARGE / max(large - small, 1e-9), Seconds(small))


def _seconds(channel: Channel, size: int) -> float:
    exchange = ring(channel, Bytes(size))
    found = []
    # The first connects.
    for _ in range(_TIMES[size] + 1):
        begun = perf_counter()
        exchange()
        found.append(perf_counter() - begun)
    return min(found[1:])


def ring(channel: Channel, size: Bytes) -> Callable[[], None]:
    """A function that sends so many bytes to the next rank and receives as many from the one before.

    All ranks of the channel must call it together.
    """
    after, before = (channel.index + 1) % channel.size, (channel.index - 1) % channel.size
    own, came = torch.zeros(2, size, dtype=torch.uint8, device=channel.device)
    sends = [[own] if peer == after else [] for peer in range(channel.size)]
    receives = [[came] if peer == before else [] for peer in range(channel.size)]
    return lambda: channel.exchange(sends, receives)
