"""Divergence: ranks that run different ops are told by an error, not by a hang or by wrong numbers."""

from __future__ import annotations

import sys
import zlib
from weakref import WeakKeyDictionary

import torch

from weft.capture.locations import in_library
from weft.errors import RankFailure
from weft.runtime.channel import Channel

# How many collectives each channel has run.
_counts: WeakKeyDictionary[Channel, int] = WeakKeyDictionary()


def check_agreement(channel: Channel, what: str) -> None:
    """Check that all ranks of a channel are about to run the same collective for the same op.

    Every rank sends a number that stands for its collectives so far and `what` comes next. Only when they differ are
    the texts exchanged too.

    Raises:
        RankFailure: names what every rank runs, and its line.
    """
    count = _counts.get(channel, 0) + 1
    _counts[channel] = count
    mine = torch.tensor([count, zlib.crc32(what.encode())], device=channel.device)
    found = [torch.empty_like(mine) for _ in channel.ranks]
    channel.exchange([[mine]] * channel.size, [[buffer] for buffer in found])
    found[channel.index] = mine
    if all(torch.equal(other, mine) for other in found):
        return
    texts = channel.exchange_text(f"{what} ({user_line()})")
    pairs = zip(channel.ranks, texts, strict=True)
    raise RankFailure(
        "the ranks run different ops; every rank must make the same calls on global tensors in the same order. "
        + "; ".join(f"rank {rank}: {text}" for rank, text in pairs)
    )


def user_line() -> str:
    """File and line of the innermost frame of the user's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        if not in_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "line unknown"
