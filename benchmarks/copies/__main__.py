"""Copies of activations for torch's pipeline schedules: weft's beside those of torch's analysis, at equal times.

    python -m benchmarks.copies --json docs/results/copies.json

Each forward takes a second, a backward two, one for inputs and one for weights where it is split; transfers none. Of
torch come the lists of acts of its own schedules, and the slots that they need (`torch_orders.py`); of weft plans of
the same stages, as the compiler schedules them by name (`unit_stages.py`). Where these keep more, or take longer, it is
looked how few copies would do: one after the other is taken away that the step can do without. The compiler does not
do that yet: it takes some hundred simulations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import final

from benchmarks.copies.torch_orders import orders, seconds, slots
from benchmarks.copies.unit_stages import Draft, Layout, drafted, fewer, homes
from weft.strategy.parts import Schedule

RANKS, MICRO_BATCHES = (2, 4, 8), (4, 8, 16, 32)
# The largest numbers for which copies are taken away.
FEWER_RANKS, FEWER_MICRO_BATCHES = 4, 16


@final
@dataclass(frozen=True)
class Peer:
    """A schedule of torch's, and weft's for the same stages.

    Attributes:
        torch: the name of its class.
        layout: of its stages on ranks.
        name: of weft's.
        others: further ones, from which copies may be taken away.
    """

    torch: str
    layout: Layout
    name: Schedule
    others: tuple[Schedule, ...] = ()


PEERS = (
    Peer("ScheduleGPipe", "one", "gpipe"),
    Peer("Schedule1F1B", "one", "1f1b"),
    Peer("ScheduleInterleavedZeroBubble", "one", "zero_bubble"),
    Peer("ScheduleInterleaved1F1B", "round", "interleaved", ("1f1b",)),
    Peer("ScheduleInterleavedZeroBubble", "round", "zero_bubble"),
    Peer("ScheduleZBVZeroBubble", "v", "zero_bubble", ("interleaved",)),
    Peer("ScheduleDualPipeV", "v", "zero_bubble", ("interleaved",)),
)


@final
@dataclass(frozen=True)
class Found:
    """A plan of weft's.

    Attributes:
        seconds: of a step.
        kept: for each rank, the most activations that it keeps at a time.
        copies: of the register of each stage.
        held: no more is kept on any rank than torch's slots, in no more time.
    """

    seconds: float
    kept: tuple[int, ...]
    copies: dict[str, int]
    held: bool


@final
@dataclass(frozen=True)
class Row:
    """A schedule on so many ranks.

    Attributes:
        torch, layout, ranks, micro_batches: which.
        seconds, slots: of torch's.
        named: weft's of that name.
        fewer: with as few copies as do, where the named one keeps more or takes longer.
    """

    torch: str
    layout: Layout
    ranks: int
    micro_batches: int
    seconds: int
    slots: tuple[int, ...]
    named: Found
    fewer: Found | None = None


def rows() -> Iterator[Row]:
    """All schedules, but those that torch does not have for so few micro-batches."""
    for peer, ranks, micro_batches in product(PEERS, RANKS, MICRO_BATCHES):
        try:
            lists = orders(peer.torch, homes(peer.layout, ranks), micro_batches)
        except (ValueError, RuntimeError) as error:
            print(f"{peer.torch} on {ranks} ranks, {micro_batches} micro-batches: {error}")
            continue
        yield row(
            peer,
            ranks,
            micro_batches,
            seconds(lists, len(homes(peer.layout, ranks))),
            tuple(map(slots, lists)),
        )


def row(peer: Peer, ranks: int, micro_batches: int, most: int, allowed: tuple[int, ...]) -> Row:
    """Weft's beside torch's seconds and slots."""

    def found(draft: Draft) -> Found:
        kept = tuple(draft.kept(rank) for rank in range(ranks))
        fits = all(own <= its for own, its in zip(kept, allowed, strict=True))
        return Found(draft.seconds, kept, draft.copies, fits and draft.seconds <= most)

    named = found(drafted(peer.name, peer.layout, ranks, micro_batches))
    least = None
    if not named.held and ranks <= FEWER_RANKS and micro_batches <= FEWER_MICRO_BATCHES:
        for name in (peer.name, *peer.others):
            draft = drafted(name, peer.layout, ranks, micro_batches, split=True)
            if draft.seconds <= most and (least is None or not least.held):
                least = found(fewer(draft, most))
    return Row(peer.torch, peer.layout, ranks, micro_batches, most, allowed, named, least)


def main() -> None:
    """Print a line for each, and what holds in all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    chosen = parser.parse_args()
    found: list[Row] = []
    begun = time.process_time()
    for each in rows():
        found.append(each)
        least = f"; fewer {each.fewer.kept} in {each.fewer.seconds:g} s" if each.fewer else ""
        print(
            f"{each.torch} {each.layout} {each.ranks} x {each.micro_batches}: torch {each.slots} in {each.seconds} s; "
            f"weft {each.named.kept} in {each.named.seconds:g} s{least}",
            flush=True,
        )
        if chosen.json:
            chosen.json.write_text(json.dumps([asdict(one) for one in found]) + "\n")
    named = sum(each.named.held for each in found)
    others = [each.fewer.held for each in found if each.fewer]
    print(
        f"{named} of {len(found)} keep no more as compiled; of {len(others)} others {sum(others)} with fewer copies; "
        f"{time.process_time() - begun:.0f} s of CPU"
    )


if __name__ == "__main__":
    main()
